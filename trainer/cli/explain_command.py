"""`explain`: one group's life in order, as a table or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from ...broker.group_life import GroupEvent, GroupLife, read_group_life
from ...broker.settings import BrokerSettings
from ...broker.wording import counted
from .console import add_row, clock, new_table, out, print_json, seconds, show_table
from .targets import AsJson, BrokerUrl, RunName, on_run

_COLUMNS = ("time (UTC)", "after", "what", "attempt", "instance", "detail")
_BAD = frozenset({"lost", "refused", "retry", "dead", "abandoned", "foreign"})
_WORDS = {
    "accepted": "rows in",
    "finished": "finished",
    "lost": "lease over",
    "refused": "write refused",
    "retry": "failed, will retry",
    "released": "handed back",
    "found": "found again",
    "dead": "failed for good",
}


def explain(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id.")],
    group: Annotated[int, typer.Argument(metavar="GROUP", help="The group's index in the batch, from 0.", min=0)],
    broker_url: BrokerUrl = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Tell one group's life in order: published, taken by whom, rows accepted, writes refused, taken over, failed,
    finished.

    Works after the batch is over too, as long as its events are kept (the newest 20,000 of a run).

    Example: rolloutbus explain 4f1c0a9be210 17
    """
    life = on_run(broker_url, run, lambda link, keys: read_group_life(link, keys, batch, group))
    if as_json:
        print_json(dataclasses.asdict(life))
        return
    for line in headline(life):
        out.print(line)
    if life.events:
        show_table(_table(life))
    failure = life.letter.failure if life.letter else None
    if life.letter:
        out.print(f"dead letter {life.letter.entry}: {life.letter.reason}", style="red")
    if failure:
        out.print(failure.traceback.rstrip() or f"{failure.type}: {failure.message}")


def headline(life: GroupLife) -> Iterator[str]:
    """Where the group stands now, and what is not known any more."""
    record = life.record
    name = f"group {life.group} of batch {life.batch}"
    if life.unreadable:
        yield f"{name} ({life.batch_state}): its record cannot be read, no process of rolloutbus wrote it so"
    elif record is None:
        yield f"{name}: the batch is over, its record is gone; what is left are events" + (
            " and a dead letter" if life.letter else ""
        )
    else:
        holder = f" on {record.instance}" if record.status == "running" else ""
        progress = f"attempt {record.attempt}, {counted(record.accepted_rows, 'row')} accepted"
        yield f"{name} ({life.batch_state}): {record.status}{holder}, {progress}"
    if record is not None and record.idle_s is not None:
        left = BrokerSettings().lease_s - record.idle_s
        until = f"ends in {seconds(left)} unless renewed" if left > 0 else "has run out, anybody may take it over"
        yield f"lease renewed {seconds(record.idle_s)} ago; it {until} (lease_s at its default)"
    if record is not None and record.infra_failures + record.data_failures:
        yield f"failed attempts so far: {record.infra_failures} infra, {record.data_failures} data"
    if life.trimmed:
        since = (
            f"; the oldest event kept is of {clock(life.events_since_ms, date=True)} UTC"
            if life.events_since_ms
            else ""
        )
        yield f"its first events were trimmed, so the beginning is missing{since}"


def _table(life: GroupLife) -> Table:
    table = new_table(clock(life.events[0].at_ms, date=True)[:10], _COLUMNS, ("after", "attempt"))
    first = life.events[0].at_ms
    for event in life.events:
        after = f"{(event.at_ms - first) / 1000:+.3f}s"
        instance = "" if event.instance == "-" else event.instance
        add_row(
            table, clock(event.at_ms), after, _WORDS.get(event.kind, event.kind), event.attempt or "", instance,
            _detail(event),
            style="red" if event.kind in _BAD else "",
        )  # fmt: skip
    return table


# The event does not tell which: the fleet gives the leases of a process that died free by making them old.
_EXPIRED, _OVER = "lease expired; ", "run out, or its instance died; "


def _detail(event: GroupEvent) -> str:
    """Accepted rows stand in an event as positions in the group."""
    if event.kind == "lost" and event.detail.startswith(_EXPIRED):
        return _OVER + event.detail.removeprefix(_EXPIRED)
    if event.kind in ("accepted", "finished") and event.detail:
        return "all rows" if event.detail == "all" else f"rows {event.detail} of the group"
    return event.detail

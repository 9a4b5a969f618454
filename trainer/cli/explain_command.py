"""`explain`: one group's life in order, as a table or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from ...broker.channel import Link
from ...broker.group_life import GroupEvent, GroupLife, read_group_life
from ...broker.group_record import ENDED, GroupRecord
from ...broker.keys import Keys
from ...broker.settings import BrokerSettings
from ...broker.wording import counted
from .console import add_row, clock, new_table, out, print_json, seconds, show_table
from .targets import AsJson, BrokerUrl, RunName, batch_to_explain, on_run

COLUMNS = ("time (UTC)", "after", "what", "attempt", "instance", "detail")
_BAD = frozenset({"lost", "refused", "retry", "dead", "abandoned", "foreign"})
EVENT_WORDS = {
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
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id, or its beginning.")],
    group: Annotated[int, typer.Argument(metavar="GROUP", help="The group's index in the batch, from 0.", min=0)],
    broker_url: BrokerUrl = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Tell one group's life in order: published, taken by whom, rows accepted, writes refused, taken over, failed,
    finished; and while it runs, since when, where, and until when it may.

    Works after the batch is over too, as long as its events are kept (the newest 20,000 of a run).

    Example: rolloutbus explain 4f1c0a9be210 17
    """

    async def look(link: Link, keys: Keys) -> GroupLife:
        return await read_group_life(link, keys, await batch_to_explain(link, keys, batch), group)

    life = on_run(broker_url, run, look)
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
        yield f"{name} {_standing(life, record)}, attempt {record.attempt}"
        yield _accepted(life, record)
    if life.batch_state == "closed":
        yield f"the batch was cancelled: {life.batch_reason or 'no reason given'}"
    elif record is not None:
        yield from _running(life, record)
    if record is not None and record.infra_failures + record.data_failures:
        yield f"failed attempts so far: {record.infra_failures} infra, {record.data_failures} data"
    if life.trimmed:
        since = (
            f"; the oldest event kept is of {clock(life.events_since_ms, date=True)} UTC"
            if life.events_since_ms
            else ""
        )
        yield f"its first events were trimmed, so the beginning is missing{since}"


def _standing(life: GroupLife, record: GroupRecord) -> str:
    """The batch's state, the group's, and who has it."""
    holder = f" on {record.instance}" if record.status == "running" else ""
    if life.batch_state == "closed" and record.status not in ENDED:
        # Its record stays as it was, and nobody goes on with it.
        return f"({life.batch_state}): cancelled when {record.status}{holder}"
    return f"({life.batch_state}): {record.status}{holder}"


def _accepted(life: GroupLife, record: GroupRecord) -> str:
    rows = f"{record.accepted_rows} of {counted(life.rows, 'row')}" if life.rows else f"{record.accepted_rows} rows"
    came = [event.at_ms for event in life.events if event.kind in ("accepted", "finished")]
    last = f", the last {_ago(life, came[-1])} ago" if came else ""
    # Without these words a group that is nearly done looks as if it had not begun.
    at_once = " (commit: group, all at once)" if life.commit == "group" and record.status not in ENDED else ""
    return f"{rows} accepted{last}{at_once}"


def _running(life: GroupLife, record: GroupRecord) -> Iterator[str]:
    """Since when a group runs, until when it may, and for how long its instance has it."""
    since, taken = life.attempt_since_ms or record.first_take_ms, record.first_take_ms
    if record.status == "running":
        yield f"running for {_ago(life, since)}, since {_time(since)} UTC"
    if record.status not in ENDED and taken and (record.status != "running" or record.attempt > 1):
        yield f"first taken {_ago(life, taken)} ago, at {_time(taken)} UTC"
    if life.deadline_ms is not None and life.group_timeout_s is not None:
        when = f"{_until(life, life.deadline_ms)}, at {_time(life.deadline_ms)} UTC"
        yield f"deadline {when}: group_timeout_s ({life.group_timeout_s:g} s) from first take"
    if record.idle_s is not None:
        left = BrokerSettings().lease_s - record.idle_s
        until = f"ends in {seconds(left)} unless renewed" if left > 0 else "has run out, anybody may take it over"
        yield f"lease renewed {seconds(record.idle_s)} ago, {until} (lease_s at its default)"


def _time(at_ms: int) -> str:
    """Seconds are enough for a person."""
    return clock(at_ms, date=True)[11:]


def _ago(life: GroupLife, at_ms: int) -> str:
    return seconds(max(0, life.now_ms - at_ms) / 1000)


def _until(life: GroupLife, at_ms: int) -> str:
    return f"in {seconds((at_ms - life.now_ms) / 1000)}" if at_ms > life.now_ms else f"passed {_ago(life, at_ms)} ago"


def _table(life: GroupLife) -> Table:
    table = new_table(clock(life.events[0].at_ms, date=True)[:10], COLUMNS, ("after", "attempt"))
    first = life.events[0].at_ms
    for event in life.events:
        after = f"{(event.at_ms - first) / 1000:+.3f}s"
        instance = "" if event.instance == "-" else event.instance
        add_row(
            table, clock(event.at_ms), after, EVENT_WORDS.get(event.kind, event.kind), event.attempt or "", instance,
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

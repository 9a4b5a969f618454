"""`status`: what a run is doing. It needs nothing but the broker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from ...broker.channel import Link
from ...broker.errors import BrokerTimeoutError, BrokerUnavailableError, ConfigError
from ...broker.group_record import WAITING
from ...broker.inspection import BatchState, RunState, ShardState, find_runs, inspect_run
from ...broker.running_groups import RunningGroup
from ...broker.wording import counted
from .console import add_row, clock, new_table, out, print_json, say, seconds, show_table
from .diagnosis import batches_of
from .targets import AsJson, BrokerUrl, RunName, on_broker, the_run

SHARD_COLUMNS = ("shard", "queued", "running", "delayed", "parked", "oldest", "alive", "slots", "dead")
LONGEST_COLUMNS = ("batch", "group", "instance", "attempt", "rows in", "since UTC", "running", "left")
BATCH_COLUMNS = ("batch", "client", "state", "groups", "done", "failed", "run", "wait", "age", "seen")
INSTANCE_COLUMNS = ("instance", "host", "pid", "running", "slots")
LONGEST_TITLE = "longest-running group of each shard"
# A group that has used so much of its time up is shown in red.
_LATE = 0.5
# Nobody looks that seldom, and the clock takes no number without end.
_LONGEST_WATCH_S = 86_400.0

Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        metavar="SECONDS",
        min=0.1,
        help="Look again every so many seconds, until Ctrl-C; also while the broker is away.",
        show_default=False,
    ),
]


def status(broker_url: BrokerUrl = None, run: RunName = None, as_json: AsJson = False, watch: Watch = None) -> None:
    """Show shards, instances and batches of a run, or of all runs.

    Groups of a shard are queued (nobody has them), running, delayed (waiting for a retry) or parked (their batch has no
    room for results); `oldest` is the age of the oldest of them. Of each shard, the group that has run for longest:
    give its batch and number to `explain`. Of a batch, `seen` is how long ago its client was.

    Example: rolloutbus status --run exp1 --watch 2
    """

    async def look(link: Link) -> list[RunState]:
        runs = [(await the_run(link, run)).run] if run is not None else await find_runs(link)
        return [await inspect_run(link, name) for name in runs]

    # Not all versions of Typer keep NaN out of the option's range, and it is not above anything either.
    if watch is not None and not watch <= _LONGEST_WATCH_S:
        raise ConfigError(f"--watch {watch:g} is no time to wait; give at most {_LONGEST_WATCH_S:.0f} seconds")
    show_all(on_broker(broker_url, look), as_json=as_json)
    while watch is not None:
        time.sleep(watch)
        try:
            states = on_broker(broker_url, look)
        # A broker that was started anew may not have the run yet.
        except (BrokerUnavailableError, BrokerTimeoutError, ConfigError) as error:
            say(f"{clock(int(time.time() * 1000))} {error}", "red")
            continue
        if out.is_terminal and not as_json:
            out.clear()
        show_all(states, as_json=as_json)


def show_all(states: Sequence[RunState], *, as_json: bool) -> None:
    """All runs on standard output, as tables or as one JSON document, at once also where that is a pipe."""
    if as_json:
        print_json({"runs": [dataclasses.asdict(state) for state in states]})
    elif not states:
        out.print("no run on this broker; start one with `rolloutbus up` or `rolloutbus run`, or name another broker")
    else:
        for state in states:
            show(state)
    out.file.flush()


def show(state: RunState) -> None:
    """The run's tables on standard output."""
    fleet = "up" if state.fleet else "none"
    letters = counted(state.dead_letters, "dead letter")
    out.print(f"run {state.run}: fleet {fleet}, {batches_of(state)}, {letters}", style="bold")
    if state.shards:
        show_table(_shard_table(state))
    if any(shard.longest for shard in state.shards):
        show_table(_longest_table(state))
    instances = [instance for shard in state.shards for instance in shard.instances]
    if instances:
        table = new_table("", INSTANCE_COLUMNS, ("pid", "running", "slots"))
        for instance in instances:
            add_row(table, instance.label, instance.host, instance.pid, instance.running, instance.slots)
        show_table(table)
    if state.batches:
        show_table(_batch_table(state))
    for batch in state.closed_batches:
        out.print(_told_closed(batch), style="yellow")
    for shard in state.shards:
        if shard.lost:
            out.print(f"shard {shard.shard} is lost: {shard.lost}", style="red")
    for what in state.unreadable:
        out.print(f"cannot be read: {what}", style="red")


def _shard_table(state: RunState) -> Table:
    table = new_table("", SHARD_COLUMNS, SHARD_COLUMNS[1:], whole=SHARD_COLUMNS[1:])
    for shard in state.shards:
        add_row(
            table, shard.shard, shard.queued, shard.running, shard.delayed, shard.parked, seconds(shard.oldest_age_s),
            f"{len(shard.instances)}/{shard.replicas}", _slots(shard), shard.dead_letters,
            style="red" if len(shard.instances) < shard.replicas else "",
        )  # fmt: skip
    return table


def _slots(shard: ShardState) -> str:
    """Slots in use of those there are."""
    return f"{sum(i.running for i in shard.instances)}/{sum(i.slots for i in shard.instances)}"


def _longest_table(state: RunState) -> Table:
    table = new_table(LONGEST_TITLE, LONGEST_COLUMNS, ("group", *LONGEST_COLUMNS[3:]), whole=LONGEST_COLUMNS[3:])
    for shard in state.shards:
        if group := shard.longest:
            gone = "" if group.instance_alive else " (gone)"
            # With `commit: group` none is in before all are.
            rows_in = "-" if shard.commit == "group" else f"{group.accepted_rows}/{group.rows}"
            add_row(
                table, group.batch, group.group, group.instance + gone, group.attempt, rows_in,
                clock(group.first_take_ms, date=True)[11:], seconds(group.running_s), _left(group),
                style="red" if gone or _is_late(shard, group) else "",
            )  # fmt: skip
    return table


def _left(group: RunningGroup) -> str:
    """Of the time that its shard gives a group."""
    return "over" if group.deadline_s is not None and group.deadline_s <= 0 else seconds(group.deadline_s)


def _is_late(shard: ShardState, group: RunningGroup) -> bool:
    return shard.group_timeout_s is not None and group.running_s > _LATE * shard.group_timeout_s


def _told_closed(batch: BatchState) -> str:
    groups = counted(batch.cancelled, "group")
    why = batch.reason or "no reason given"
    return f"batch {batch.batch}: cancelled ({why}), {groups}; its client has not closed it yet"


def _batch_table(state: RunState) -> Table:
    table = new_table("", BATCH_COLUMNS, BATCH_COLUMNS[3:], whole=("batch", "state", "age", "seen"))
    for batch in state.batches:
        # What ran or waited when it was cancelled does so no more, and its records stay as they were.
        running = None if batch.is_closed else batch.statuses.get("running", 0)
        waiting = None if batch.is_closed else sum(batch.statuses.get(status, 0) for status in WAITING)
        add_row(
            table, batch.batch, batch.client, batch.state, batch.groups, batch.completed, batch.failed,
            running, waiting, seconds(batch.age_s), seconds(batch.client_seen_s),
            style="yellow" if batch.is_closed else "",
        )  # fmt: skip
    return table

"""`status` and `cancel`: what a run is doing, and ending a batch of it. Both need nothing but the broker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from ...broker.channel import Link
from ...broker.client_transitions import cancel_batch
from ...broker.errors import BrokerTimeoutError, BrokerUnavailableError, ConfigError, UnknownBatchError
from ...broker.group_record import WAITING
from ...broker.inspection import RunState, ShardState, find_runs, inspect_run
from ...broker.keys import Keys
from ...broker.steps import ask
from ...broker.wording import counted
from .console import add_row, clock, new_table, out, print_json, say, seconds, show_table
from .targets import AsJson, BrokerUrl, RunName, on_broker, on_run, the_run

_SHARD_COLUMNS = ("shard", "queued", "running", "delayed", "parked", "oldest", "alive", "slots", "dead")
_BATCH_COLUMNS = ("batch", "client", "state", "groups", "done", "failed", "run", "wait", "age", "seen")
_INSTANCE_COLUMNS = ("instance", "host", "pid", "running", "slots")
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
    """Show shards, instances and open batches of a run, or of all runs.

    Groups of a shard are queued (nobody has them), running, delayed (waiting for a retry) or parked (their batch has no
    room for results); `oldest` is the age of the oldest of them. Of a batch, `seen` is how long ago its client was.

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
    batches = counted(len(state.batches), "open batch", "open batches")
    letters = counted(state.dead_letters, "dead letter")
    out.print(f"run {state.run}: fleet {fleet}, {batches}, {letters}", style="bold")
    if state.shards:
        show_table(_shard_table(state))
    instances = [instance for shard in state.shards for instance in shard.instances]
    if instances:
        table = new_table("", _INSTANCE_COLUMNS, ("pid", "running", "slots"))
        for instance in instances:
            add_row(table, instance.label, instance.host, instance.pid, instance.running, instance.slots)
        show_table(table)
    if state.batches:
        show_table(_batch_table(state))
    for shard in state.shards:
        if shard.lost:
            out.print(f"shard {shard.shard} is lost: {shard.lost}", style="red")
    for what in state.unreadable:
        out.print(f"cannot be read: {what}", style="red")


def _shard_table(state: RunState) -> Table:
    table = new_table("", _SHARD_COLUMNS, _SHARD_COLUMNS[1:], whole=_SHARD_COLUMNS[1:])
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


def _batch_table(state: RunState) -> Table:
    table = new_table("", _BATCH_COLUMNS, _BATCH_COLUMNS[3:], whole=("batch", "state", "age", "seen"))
    for batch in state.batches:
        waiting = sum(batch.statuses.get(status, 0) for status in WAITING)
        add_row(
            table, batch.batch, batch.client, batch.state, batch.groups, batch.completed, batch.failed,
            batch.statuses.get("running", 0), waiting, seconds(batch.age_s), seconds(batch.client_seen_s),
        )  # fmt: skip
    return table


def cancel(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id, as `status` shows it.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Told to the batch's client.")
    ] = "rolloutbus cancel",
    broker_url: BrokerUrl = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a batch, whoever published it: its queued groups are dropped, running ones stopped, its client gets an
    error.

    Example: rolloutbus cancel 4f1c0a9be210 --reason "wrong checkpoint"
    """

    stopped = on_run(broker_url, run, lambda link, keys: end_batch(link, keys, batch, reason))
    if as_json:
        print_json({"batch": batch, "cancelled_groups": stopped})
    else:
        out.print(f"batch {batch}: {counted(stopped, 'group')} cancelled")


async def end_batch(link: Link, keys: Keys, batch: str, reason: str) -> int:
    """Cancel whoever's batch; how many groups that stopped. Raises `UnknownBatchError`."""
    client, shards = (await ask(link, [("HMGET", keys.batch(batch), "client", "shards")]))[0]
    if client is None:
        raise UnknownBatchError(f"run {keys.run!r} has no open batch {batch!r}; see `rolloutbus status`")
    # A record that somebody tampered with may lack any field.
    return await cancel_batch(link, keys, batch, client.decode(), (shards or b"").decode().split(), reason)

"""Publishing in one process and collecting in another, out of the pieces that `RolloutClient` is made of.

    python -m examples.split_trainer publish redis://127.0.0.1:6379 exp1 prompts.jsonl 8 &
    python -m examples.split_trainer collect redis://127.0.0.1:6379 exp1 prompts.jsonl 8

To the broker both are one client: they share its name, an incarnation that is new for each batch, and the batch's id,
here all made from `--batch`. Both cut the same rows into the same groups. The publisher may end once the batch is
sealed; whoever collects keeps the client's lease, looks after groups that nobody finishes, and closes the batch.

Either may die and be started again: what is published stays, and what was handed over does not come again. For a
publisher that died before the seal the collector waits, and says each minute that nothing came.

What `RolloutClient` has beside this: it publishes again what a broker without a disk lost, and cancels the batch when
it is left early.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutbus.broker.channel import Link
from rolloutbus.broker.client_transitions import ClientTransitions
from rolloutbus.broker.errors import BooksError, OwnershipLostError, UnknownBatchError
from rolloutbus.broker.group_record import parse_group_record
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.collector import BatchCollection, Collector, GroupFailure, PackedGroup, Sink
from rolloutbus.collector.sweep import Sweeper, Watched, outline
from rolloutbus.producer import Producer, PromptGroup, Publication, check_rows, plan_groups, wait_for_route_map

CLIENT = "split"
FLEET_WAIT_S = 60.0
PUBLISHER_WAIT_S = 60.0


@dataclass(frozen=True)
class Half:
    """What both halves have: the connection, the client's steps, and the batch's rows and groups."""

    settings: BrokerSettings
    keys: Keys
    link: Link
    steps: ClientTransitions
    batch: str
    num_generations: int
    rows: list[dict[str, Any]]
    groups: list[PromptGroup]

    @property
    def publication(self) -> Publication:
        return Publication(self.batch, self.groups, self.num_generations)


@contextlib.asynccontextmanager
async def half(given: argparse.Namespace) -> AsyncGenerator[Half]:
    settings, keys = BrokerSettings(url=given.url), Keys(given.run)
    link = Link(settings, f"client:{CLIENT}:{given.role}", load_scripts)
    try:
        prompts = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
        rows = [dict(prompt) for prompt in prompts for _ in range(given.num_generations)]
        check_rows(rows, given.num_generations)
        routes = (await wait_for_route_map(link, keys, FLEET_WAIT_S)).routes
        steps = ClientTransitions(link, keys, settings, CLIENT, f"{CLIENT}-{given.batch}")
        groups = plan_groups(rows, routes, given.num_generations)
        yield Half(settings, keys, link, steps, given.batch, given.num_generations, rows, groups)
    finally:
        await link.close()


async def own(half: Half) -> None:
    """Take or renew the client's lease."""
    if left := await half.steps.own():
        raise OwnershipLostError(f"client {CLIENT!r} belongs to another batch for another {left / 1000:.0f} s")


async def publish(half: Half) -> None:
    await own(half)
    await Producer(half.link, half.keys, half.settings, half.steps).publish(half.publication)
    print(json.dumps({"sealed": half.batch, "groups": len(half.groups)}), flush=True)


async def collect(half: Half) -> None:
    outcomes: asyncio.Queue[PackedGroup | GroupFailure | BaseException] = asyncio.Queue()
    shards = [group.shard for group in half.groups]
    sink = Sink(outcomes.put_nowait, outcomes.put_nowait)
    collection = BatchCollection(half.batch, half.rows, half.num_generations, shards, sink)
    collector = Collector(half.settings, half.keys, half.link, half.steps)
    sweeper = Sweeper(half.settings, half.keys, half.link, half.steps, collector.taken_in)
    await own(half)
    await collector.attach(collection, half.publication.shards)
    watched = Watched(collection, lambda at: _outline(half, at), {})
    await _opened(half)
    await _skip_what_was_told(half, collection)
    duties = [
        asyncio.create_task(collector.run()),
        asyncio.create_task(_every(half.settings.renew_every_s, lambda: own(half))),
        asyncio.create_task(_every(half.settings.sweep_every_s, lambda: sweeper.sweep(watched))),
    ]
    try:
        for _ in collection.unfinished():
            outcome = await _next(outcomes, duties)
            print(json.dumps(_told(outcome)), flush=True)
            collector.hand_over(half.batch, [outcome.group_index])
        await _close(half, collector)
    finally:
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)
    await half.steps.resign(half.publication.shards)


async def _opened(half: Half) -> None:
    """Before the publisher has opened it, the batch would count as gone."""
    deadline = time.monotonic() + PUBLISHER_WAIT_S
    while (await half.link.run([("EXISTS", half.keys.batch(half.batch))]))[0] == 0:
        if time.monotonic() > deadline:
            raise UnknownBatchError(
                f"nobody has published batch {half.batch} within {PUBLISHER_WAIT_S:g} s; start the half that publishes"
            )
        await own(half)
        await asyncio.sleep(0.05)


async def _skip_what_was_told(half: Half, collection: BatchCollection) -> None:
    """What a collector that died before had handed over, or told as failed, is over."""
    fields = [f"g:{group.index}" for group in half.groups]
    (records,) = await half.link.run([("HMGET", half.keys.batch(half.batch), *fields)])
    for group, raw in zip(half.groups, records, strict=True):
        record = parse_group_record(raw) if raw else None
        if record is not None and (record.told or record.status == "handed"):
            collection.skip(group.index, completed=not record.told, failed=record.told)


async def _every(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await act()


async def _next(outcomes: asyncio.Queue[Any], duties: list[asyncio.Task[None]]) -> PackedGroup | GroupFailure:
    """The next group; raises what ended the batch, or one of the duties, which never end by themselves."""
    coming = asyncio.create_task(outcomes.get())
    await asyncio.wait([coming, *duties], return_when=asyncio.FIRST_COMPLETED)
    if not coming.done():
        coming.cancel()
        await next(duty for duty in duties if duty.done())
    if isinstance(outcome := coming.result(), BaseException):
        raise outcome
    return outcome


def _outline(half: Half, at: int) -> Any:
    group = half.groups[at]
    return outline(half.batch, at, group.shard, group.route, half.num_generations, group.first_row)


def _told(outcome: PackedGroup | GroupFailure) -> dict[str, Any]:
    if isinstance(outcome, GroupFailure):
        return {"group": outcome.group_index, "failed": outcome.sentence}
    rewards = [result.get("reward") for result in outcome.opened().results]
    return {"group": outcome.group_index, "rewards": rewards}


async def _close(half: Half, collector: Collector) -> None:
    """What was handed over is acknowledged first; then the books must balance."""
    await collector.handed_over()
    books = await half.steps.close(half.batch, {})
    collector.detach(half.batch)
    if books is None or not books.balanced:
        raise BooksError(f"the books of batch {half.batch} do not balance: {books}")
    print(json.dumps({"published": books.published, "completed": books.completed, "failed": books.failed}), flush=True)


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One half of a trainer: publish a batch, or collect it.")
    parser.add_argument("role", choices=["publish", "collect"])
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("rows", type=Path, help="prompts as JSON lines")
    parser.add_argument("num_generations", type=int)
    parser.add_argument("--batch", default="step-1")
    return parser.parse_args()


async def main() -> None:
    given = _given()
    async with half(given) as mine:
        await (publish if given.role == "publish" else collect)(mine)


if __name__ == "__main__":
    asyncio.run(main())

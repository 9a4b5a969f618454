"""What a fleet has published stays published, whatever became of the try, and whatever the broker has lost of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from rolloutbus.broker.channel import Link
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import BrokerUnavailableError, FleetError
from rolloutbus.broker.fleet_transitions import FleetTransitions, Published
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.shard_records import ShardRecord, parse_record
from rolloutbus.shard_workers.fleet.lease import FleetLease

ROUTES = {"add": "math"}
WHOLE = Published(ROUTES, {"math": ShardRecord(replicas=2)})
LOST = Published(ROUTES, {"math": ShardRecord(replicas=0, lost="its process died")})


class Stage:
    """A lease that is renewed often, on a broker, and what stands there."""

    def __init__(self, link: Link) -> None:
        self.keys = Keys(f"lease-{secrets.token_hex(4)}")
        self.link = link
        self.steps = FleetTransitions(link, self.keys, link.settings, "here")
        self.lease = FleetLease(link, self.steps, ["math"], lambda request: None, lambda holder: None)

    async def record(self) -> ShardRecord | None:
        return parse_record((await self.link.run([("HGET", self.keys.shards, "math")]))[0])

    async def comes(self, record: ShardRecord) -> None:
        async with asyncio.timeout(10):
            while await self.record() != record:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
async def stage(valkey: EmbeddedBroker) -> AsyncIterator[Stage]:
    link = Link(BrokerSettings(url=valkey.url, renew_every_s=0.05), "test", load_scripts)
    made = Stage(link)
    yield made
    await made.lease.give_up(["math"])
    await link.close()


def failing_once(publish: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """`publish`, of which the first call raises."""
    errors = [error]

    async def call(*args: Any, **options: Any) -> None:
        if errors:
            raise errors.pop()
        await publish(*args, **options)

    return call


async def test_what_could_not_be_published_is_by_a_later_renewal(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a shard had no instance left was never told where the broker was away at that moment, and trainers waited
    for it.
    """
    await stage.lease.claim()
    await stage.lease.publish(WHOLE)
    away = failing_once(stage.steps.publish, BrokerUnavailableError("no answer"))
    monkeypatch.setattr(stage.steps, "publish", away)
    with pytest.raises(BrokerUnavailableError):
        await stage.lease.publish(LOST)
    await stage.comes(LOST.shards["math"])


async def test_a_record_that_the_broker_has_lost_is_published_again(stage: Stage) -> None:
    """A broker that came back without its last moment kept the record before, as its routes were the same."""
    await stage.lease.claim()
    await stage.lease.publish(WHOLE)
    dumps = await stage.link.run([("DUMP", stage.keys.routes), ("DUMP", stage.keys.shards)])
    await stage.lease.publish(LOST)
    names = (stage.keys.routes, stage.keys.shards)
    await stage.link.run([("RESTORE", key, 0, dump, "REPLACE") for key, dump in zip(names, dumps, strict=True)])
    await stage.comes(LOST.shards["math"])


async def test_what_was_refused_is_not_kept(stage: Stage) -> None:
    await stage.lease.claim()
    await stage.lease.publish(WHOLE)
    await stage.link.run([("HSET", stage.keys.batch("b7"), "state", "open")])
    with pytest.raises(FleetError, match="open batches, b7 among them"):
        await stage.lease.publish(Published({"sort": "math"}, LOST.shards))
    await stage.link.run([("DEL", stage.keys.batch("b7"), stage.keys.shards)])
    await stage.comes(WHOLE.shards["math"])

"""The route map as a producer finds it on the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from rolloutbus.broker.channel import Command
from rolloutbus.broker.errors import NoInstanceError
from rolloutbus.broker.keys import Keys
from rolloutbus.producer import read_route_map, wait_for_route_map

KEYS = Keys("r")


class Hashes:
    """Stands for a broker that holds two hashes, and says when they are asked for."""

    def __init__(self, routes: dict[str, str], shards: dict[str, str]) -> None:
        self.content = {KEYS.routes: routes, KEYS.shards: shards}
        self.asked = asyncio.Event()

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        self.asked.set()
        return [
            [word.encode() for pair in self.content[str(command[1])].items() for word in pair] for command in commands
        ]


async def test_the_map_is_what_the_fleet_published() -> None:
    found = await read_route_map(Hashes({":version": "3", "a": "s"}, {"s": '{"replicas": 2, "slots": 7}'}), KEYS)
    assert found is not None
    assert dict(found.routes) == {"a": "s"}
    assert (found.shards["s"].replicas, found.shards["s"].slots) == (2, 7)


async def test_a_shard_record_that_cannot_be_read_does_not_hide_its_routes() -> None:
    found = await read_route_map(Hashes({":version": "1", "a": "s"}, {"s": "nonsense"}), KEYS)
    assert found is not None
    assert dict(found.routes) == {"a": "s"}
    assert found.shards["s"].replicas == 1


async def test_without_a_fleet_there_is_no_map() -> None:
    assert await read_route_map(Hashes({}, {}), KEYS) is None


async def test_an_empty_map_is_a_map() -> None:
    found = await read_route_map(Hashes({":version": "1"}, {}), KEYS)
    assert found is not None
    assert dict(found.routes) == {}


async def test_waiting_for_a_fleet_ends_with_an_error_that_names_run_and_remedy() -> None:
    with pytest.raises(NoInstanceError, match=r"run 'r' within 0\.05 s.*rolloutbus up") as caught:
        await wait_for_route_map(Hashes({}, {}), KEYS, 0.05)
    assert isinstance(caught.value, TimeoutError)


async def test_a_wait_for_a_fleet_is_told_long_before_its_end_and_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever mistyped the run's name looked at an empty terminal for a minute."""
    with pytest.raises(NoInstanceError):
        await wait_for_route_map(Hashes({}, {}), KEYS, 3.0)
    (said,) = caplog.messages
    assert said.startswith("no fleet has published its routes for run 'r' yet; waiting up to 3 s for one.")


async def test_a_fleet_that_comes_late_is_found() -> None:
    broker = Hashes({}, {})
    waiting = asyncio.create_task(wait_for_route_map(broker, KEYS, 30))
    await broker.asked.wait()
    broker.content[KEYS.routes]["a"] = "s"
    found = await asyncio.wait_for(waiting, 5)
    assert dict(found.routes) == {"a": "s"}

"""How an end that takes long, or fails, becomes a kill: without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import BrokerTimeoutError, NoInstanceError
from rolloutbus.shard_workers.fleet.engine import FleetEngine
from rolloutbus.shard_workers.fleet.fleet import _end_in_time  # pyright: ignore[reportPrivateUsage]
from rolloutbus.shard_workers.fleet.instances import Instance, State
from rolloutbus.shard_workers.fleet_config import read_fleet_config

from tests.shard_workers.fleet.fleets import fleet_config, shard


class Ending:
    """An engine whose end takes as long as it is told to, or fails."""

    def __init__(self, takes_s: float = 0.0, error: Exception | None = None) -> None:
        self.killed = False
        self._takes_s, self._error = takes_s, error

    async def shutdown(self, *, drain: bool) -> list[str]:
        await asyncio.sleep(self._takes_s)
        if self._error is not None:
            raise self._error
        return ["a would not"]

    async def kill(self) -> list[str]:
        self.killed = True
        return ["b"]


async def end(engine: Ending, kill_after_s: float | None) -> list[str]:
    return await _end_in_time(cast(Any, engine), True, kill_after_s)


@pytest.mark.parametrize("kill_after_s", [None, 30.0])
@pytest.mark.parametrize("error", [BrokerTimeoutError("no answer"), NoInstanceError("nobody"), TimeoutError("other")])
async def test_somebody_elses_timeout_is_no_end_of_the_patience(error: Exception, kill_after_s: float | None) -> None:
    """It killed the instances in the middle of their drain, and nobody heard of it."""
    engine = Ending(error=error)
    with pytest.raises(type(error)) as raised:
        await end(engine, kill_after_s)
    assert raised.value is error
    assert not engine.killed


async def test_an_end_in_time_tells_what_would_not_stop() -> None:
    assert await end(engine := Ending(), 30.0) == ["a would not"]
    assert not engine.killed


async def test_the_end_of_the_patience_kills_and_tells_what_was_left() -> None:
    assert await end(engine := Ending(takes_s=60.0), 0.05) == ["b had not stopped after 0.05 s"]
    assert engine.killed


async def test_killed_instances_are_freed_side_by_side_and_those_that_ran_are_named(
    valkey: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another each waited for a broker that was away, as long as an end may take."""
    config = read_fleet_config(fleet_config(valkey.url, tmp_path, [shard("s", replicas=3)]))
    engine, all_there = FleetEngine(config, None, None, lambda reason: None), asyncio.Barrier(3)

    async def freed(instance: Instance) -> int:
        return await all_there.wait()

    for slot, state in enumerate((State.RUNNING, State.STOPPED, State.DRAINING)):
        spec = config.plan.shards[0]
        engine.instances.append(Instance(spec, f"s/{slot}", slot, slot, cast(Any, None), state=state))
    monkeypatch.setattr(engine, "_free_groups", freed)
    monkeypatch.setattr(engine, "_release_all", lambda: asyncio.sleep(0))
    async with asyncio.timeout(5):
        named = await engine.kill()
    assert [name.partition("instance ")[2] for name in named] == ["s/0)", "s/2)"]

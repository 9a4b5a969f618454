"""What uses an instance's restarts up, and what does not: the supervisor alone, without Ray and without a broker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from rolloutbus.broker.errors import BrokerTimeoutError, BrokerUnavailableError
from rolloutbus.shard_workers.fleet.actor import HEALTHY, Trouble
from rolloutbus.shard_workers.fleet.instances import Instance, InstanceTroubleError, State, told
from rolloutbus.shard_workers.fleet.supervision import Callbacks, Supervisor
from rolloutbus.shard_workers.fleet_config import read_fleet_config

from tests.shard_workers.fleet.fleets import fleet_config, shard


class Stage:
    """One instance under a supervisor with one restart an hour; `starts` is how each start ends, the rest are good."""

    def __init__(self, folder: Path, starts: list[Exception | None]) -> None:
        settings = {"max_restarts": 1, "restart_backoff_s": 0.001}
        config = read_fleet_config(fleet_config("redis://127.0.0.1:1/0", folder, [shard("s")], fleet=settings))
        self.notes: list[str] = []
        self.lost: list[str] = []
        self.begun = asyncio.Event()
        self.instance = Instance(config.plan.shards[0], "s", 0, None, cast(Any, None), state=State.RUNNING)
        self.instance.ended = asyncio.get_running_loop().create_future()
        self._starts = starts
        self.supervisor = Supervisor(config, cast(Any, self), Callbacks(self._free, self._give_up, self._note))
        self.supervisor.watch(self.instance)

    async def ends(self, error: Exception) -> None:
        """The process ends with `error`; returns when another one takes groups, or none will."""
        self.begun.clear()
        assert self.instance.ended is not None
        self.instance.ended.set_result(Trouble.of(error))
        async with asyncio.timeout(10):
            await self.begun.wait()

    # What a supervisor asks of a launcher
    async def start(self, instance: Instance) -> None:
        instance.ended = asyncio.get_running_loop().create_future()
        answer = asyncio.get_running_loop().create_future()
        error = self._starts.pop(0) if self._starts else None
        answer.set_result(error and Trouble.of(error))
        told(instance, "start", answer)

    async def begin(self, instance: Instance) -> None:
        asyncio.get_running_loop().call_soon(self.begun.set)

    async def stop(self, instance: Instance) -> None:
        raise InstanceTroubleError("it has no process", dead=True)

    async def health(self, instance: Instance) -> str:
        return HEALTHY

    async def _free(self, instance: Instance) -> int:
        return 0

    async def _give_up(self, instance: Instance, reason: str) -> None:
        self.lost.append(reason)
        self.begun.set()

    async def _note(self, kind: str, instance: Instance, detail: str) -> None:
        self.notes.append(kind)


async def test_a_broker_out_of_reach_is_waited_for_and_is_no_death(tmp_path: Path) -> None:
    """Starts that could not reach the broker used the restarts up within a minute, and the instance was lost until
    somebody scaled.
    """
    away = [BrokerUnavailableError("cannot reach it"), BrokerTimeoutError("it hangs")]
    stage = Stage(tmp_path, [*away * 4, None])
    await stage.ends(BrokerUnavailableError("no answer for 300 s"))
    assert (stage.instance.state, stage.lost) == (State.RUNNING, [])
    assert stage.notes == ["instance-cut-off", "instance-restarted"], "one for the whole time, not one for each try"
    await stage.supervisor.leave(stage.instance)


async def test_deaths_count_whatever_the_broker_did_between_them(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [BrokerUnavailableError("away"), None])
    await stage.ends(RuntimeError("the first death"))
    assert stage.instance.state is State.RUNNING
    await stage.ends(RuntimeError("the second death"))
    assert stage.instance.state is State.LOST
    (reason,) = stage.lost
    assert "the second death; 2 restarts (max_restarts 1 per hour) did not help" in reason
    assert stage.notes == ["instance-died", "instance-cut-off", "instance-restarted", "instance-lost"]

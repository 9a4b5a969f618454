"""The stage where a fleet's schedule plays: broker, fleet and nodes, what is known of them, and what may be refused.

What a fleet may refuse and leave all as it was is no violation: draining a last instance, draining one that is gone.
Operations and faults add what they make possible, such as a start of which the process was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
from redis.exceptions import RedisError
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.keys import Keys
from rolloutbus.shard_workers import ShardFleet

from tests.chaos.actors import Progress
from tests.chaos.fleet_nodes import Nodes
from tests.chaos.fleet_plan import ONE_NODE_EACH, FleetPlan, Operation
from tests.chaos.plan import ShardPlan
from tests.chaos.stage import RUN, WORKER_SETTINGS
from tests.chaos.worker_process import ChaosEnvironment, KillPoint

Result = TypeVar("Result")

# More than a schedule can use up, so that the budget of restarts is never what ends an instance.
MAX_RESTARTS = 10
REFUSALS = ("is the last instance of shard", "there is no instance")
KILLED_IN_START = ("its process died", "Ray cannot make its process", "has no process")
BROKER_AWAY = ("cannot reach the broker", "check that the broker runs", "closed the connection")
NO_ROOM = ("could not be placed",)


class FleetEnvironment(ChaosEnvironment):
    """The rollouts of the chaos workers in an instance. Its label is where the fleet told it to log."""

    def __init__(self) -> None:
        super().__init__("", KillPoint(None), scored=False)
        self._shard = ""

    async def start(self, config: Mapping[str, Any]) -> None:
        folder = Path(config["nemo_gym_log_dir"])
        self._label = folder.relative_to(config["folder"]).as_posix()
        self._shard, self._scored = config["shard"], config["scored"]
        slot = int(self._label.partition("/")[2] or 0)
        await asyncio.sleep(config["start_ms"] * (1 + slot) / 1000)
        (Path(config["folder"]) / f"up-{os.getpid()}").touch()

    def list_entries(self) -> dict[str, list[str]]:
        return {self._shard: ["responses_api_agents"]}


@dataclass
class Strike:
    """An operation that struck: how long it took, and how long until the trainer logged what it had waited for."""

    operation: Operation
    what: str
    took_s: float | None = None
    recovery_s: float | None = None
    refused: str = ""


class FleetStage:
    """Broker and fleet of one schedule, and what is known of them; `expected` is how many instances a shard has."""

    def __init__(self, fleet_plan: FleetPlan, folder: Path, nodes: Nodes) -> None:
        self.fleet_plan = fleet_plan
        self.nodes = nodes
        self.plan = fleet_plan.plan
        self.keys = Keys(RUN)
        self.progress = Progress()
        self.strikes: list[Strike] = []
        self.complaints: list[str] = []
        self.expected = {shard.name: shard.replicas for shard in self.plan.shards}
        self.blurred: set[str] = set()
        self.tolerated = {*REFUSALS, *(NO_ROOM if fleet_plan.strategy == ONE_NODE_EACH else ())}
        self.fleet: ShardFleet | None = None
        self.broker = EmbeddedBroker(
            directory=folder / "broker", persistence=cast(Any, self.plan.persistence), tcp=self.plan.tcp
        )
        self._folder = folder
        self._changing: Counter[str] = Counter()
        self._watches: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await asyncio.to_thread(self.broker.start)
        self.fleet = await in_thread(lambda: ShardFleet.start(self._config()))

    def _config(self) -> dict[str, Any]:
        broker = {"url": self.broker.url, **self.plan.settings}
        # Where each has a node of its own there may be none, and that is soon known.
        patience_s = 6 if self.fleet_plan.strategy == ONE_NODE_EACH else 30
        fleet = {
            "placement_timeout_s": patience_s,
            "startup_timeout_s": 60,
            "stop_timeout_s": 15,
            "restart_backoff_s": 0.1,
        }
        per_shard = {shard.name: {"commit": shard.commit, "rerun": shard.rerun} for shard in self.plan.shards}
        workers = {"slots": self.plan.slots, "drain_timeout_s": self.fleet_plan.drain_s, "health_every_s": 0.5}
        gym = {"folder": str(self._folder), "nemo_gym_log_dir": str(self._folder)}
        return {
            "rolloutbus": {
                "run": RUN,
                "environment": f"{FleetEnvironment.__module__}:FleetEnvironment",
                "broker": broker,
                "fleet": {**fleet, "max_restarts": MAX_RESTARTS},
                "workers": {**workers, **WORKER_SETTINGS, "shards": per_shard},
            },
            "env": {
                "nemo_gym": {
                    **gym,
                    "placement_strategy": self.fleet_plan.strategy,
                    "shards": [self._shard(shard) for shard in self.plan.shards],
                }
            },
        }

    def _shard(self, shard: ShardPlan) -> dict[str, Any]:
        low = 20000 + 1000 * self.plan.shards.index(shard)
        own = {"shard": shard.name, "scored": shard.commit == "group", "start_ms": self.fleet_plan.start_ms}
        ports = {"port_range_low": low, "port_range_high": low + 1000}
        return {
            "name": shard.name, "replicas": shard.replicas, "config_paths": ["none.yaml"], "actor_cpus": 0.05,
            "overrides": own, **ports,
        }  # fmt: skip

    def control(self) -> Any:
        """The driver's own connection; neither it nor what it returns is typed."""
        redis: Any = importlib.import_module("redis.asyncio")
        return redis.Redis.from_url(self.broker.url, socket_timeout=5)

    @property
    def running(self) -> ShardFleet:
        assert self.fleet is not None
        return self.fleet

    async def logged(self, count: int) -> bool:
        """Wait until the trainer has begun and logged `count` groups; False when it finished first."""
        now = self.progress
        await now.until(lambda: (bool(now.batches) and len(now.logged) >= count) or now.over)
        return not now.over

    def struck(self, operation: Operation, what: str, held: set[str] | None = None) -> Strike:
        """It is there: from now until the trainer logs what was `held`, or else anything, is the recovery."""
        strike = Strike(operation, what)
        self.strikes.append(strike)
        began, before = time.monotonic(), set(self.progress.logged)
        waited = (held or set()) - before

        def recovered() -> bool:
            new = set(self.progress.logged)
            return self.progress.over or (waited <= new if waited else len(new) > len(before))

        async def watch() -> None:
            await self.progress.until(recovered)
            strike.recovery_s = time.monotonic() - began

        task = asyncio.create_task(watch())
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        return strike

    @contextlib.contextmanager
    def timed(self, strike: Strike) -> Generator[None]:
        """Notes how long it took, and what was refused; what may not be refused is a complaint."""
        began = time.monotonic()
        try:
            yield
        except RolloutBusError as error:
            strike.refused = str(error).partition("\n")[0]
            if not any(words in strike.refused for words in self.tolerated):
                self.complaints.append(f"{strike.what} ended with {type(error).__name__}: {strike.refused}")
        # Not where it was cancelled: then it is what is waited for.
        strike.took_s = time.monotonic() - began

    @contextlib.contextmanager
    def change(self, shard: str, after: Callable[[int], int]) -> Generator[None]:
        """A change of the number of instances. Of two at once nobody can say from here which was first."""
        self._changing[shard] += 1
        if self._changing[shard] > 1:
            self.blurred.add(shard)
        try:
            yield
            self.expected[shard] = after(self.expected[shard])
        finally:
            self._changing[shard] -= 1

    async def stop(self) -> None:
        """End the fleet, whatever happened; one that cannot end itself is left to whoever kills its processes."""
        for task in self._watches:
            task.cancel()
        fleet = self.fleet
        if fleet is not None:
            with contextlib.suppress(RolloutBusError, TimeoutError):
                async with asyncio.timeout(20):
                    await in_thread(lambda: fleet.shutdown(drain=False))

    def up(self) -> set[int]:
        """Processes of which the stack has come up, whether they live or not."""
        return {int(path.name.removeprefix("up-")) for path in self._folder.glob("up-*")}

    async def held_by(self, label: str) -> set[str]:
        """Groups that it took and of which nothing was heard since, by the broker's record; none while that is away."""
        held: set[str] = set()
        with contextlib.suppress(OSError, RedisError):
            async with self.control() as control:
                for _, fields in await control.xrange(self.keys.events):
                    event = {name.decode(): value.decode() for name, value in fields.items()}
                    taken = event["kind"] == "taken" and event["instance"] == label
                    (held.add if taken else held.discard)(f"{event['batch']}:{event['group']}")
        return held


async def in_thread(work: Callable[[], Result]) -> Result:
    """`asyncio.to_thread` in a thread that keeps nobody from leaving: a call that hangs is what is looked for here."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(RuntimeError(f"it was ended by {type(error).__name__}"))

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


def instance_processes() -> list[psutil.Process]:
    """Processes of instances below this one, oldest first: one Ray and one schedule at a time, so all are its own."""
    found = [process for process in psutil.Process().children(recursive=True) if _is_instance(process)]
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def instance_pids() -> set[int]:
    return {process.pid for process in instance_processes()}


def _is_instance(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()[:1]).startswith("ray::InstanceActor")
    except psutil.Error:
        return False

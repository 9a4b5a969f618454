"""What a fleet's schedule does, derived from its seed alone; the stage where it plays; the operations that strike it.

An operation waits for groups that the trainer logged, not for the clock. What a fleet may refuse and leave all as it
was is no violation: draining a last instance, draining one that is gone, a start of which the process was killed or
that met a broker which was away.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
from redis.exceptions import RedisError
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.fleet_transitions import request_scale
from rolloutbus.broker.keys import Keys
from rolloutbus.shard_workers import ShardFleet

from tests.chaos.actors import Progress
from tests.chaos.plan import BROKER_SETTINGS, BatchPlan, Plan, ShardPlan
from tests.chaos.stage import RUN, WORKER_SETTINGS
from tests.chaos.worker_process import ChaosEnvironment, KillPoint

Result = TypeVar("Result")

# More than a schedule can use up, so that the budget of restarts is never what ends an instance.
MAX_RESTARTS = 10
# Long enough that a start, slow as it is on a busy machine, falls into the batch.
BATCH_S = (5.0, 10.0)
REFUSALS = ("is the last instance of shard", "there is no instance")
KILLED_IN_START = ("its process died", "Ray cannot make its process", "has no process")
BROKER_AWAY = ("cannot reach the broker",)


@dataclass(frozen=True)
class Operation:
    """`at` counts groups that the trainer has logged; `many` instances more or fewer; `victim` and `pause_s` say whom
    and how soon after the first half of it.
    """

    kind: str
    shard: str
    at: int
    many: int
    victim: int
    pause_s: float
    overlaps: bool


@dataclass(frozen=True)
class FleetPlan:
    """`plan` as the verdict knows it. A stack takes `start_ms` to be up, and as much more for each slot before its own;
    where the fleet does not settle, it is shut down while what was killed may still be on its way back.
    """

    plan: Plan
    operations: tuple[Operation, ...]
    start_ms: int
    drain_s: float
    settles: bool


def make_fleet_plan(seed: int) -> FleetPlan:
    """The schedule that `seed` stands for."""
    dice = random.Random(f"{seed}:fleet")
    shards = (
        ShardPlan("wide", 2, "row", dice.choice(["group", "missing"])),
        ShardPlan("narrow", dice.choice([1, 2]), dice.choice(["row", "group"]), "group"),
    )
    slots = dice.choice([1, 2, 4])
    count = dice.choice([1, 1, 2])
    client = dice.choice(["trainer", "second"])
    first = _batch(dice, shards, slots, 0)
    batches = (first, replace(_batch(dice, shards, slots, 1), client=client))[:count]
    operations = tuple(_operation(dice, shards, first.groups) for _ in range(dice.choice([1, 2, 2, 3])))
    settings = dict(BROKER_SETTINGS)
    if dice.random() < 0.2:
        settings |= {"max_queued_bytes": 20_000, "max_unread_bytes": 30_000}
    plan = Plan(
        seed=seed, fault=" & ".join(operation.kind for operation in operations), shards=shards, batches=batches,
        persistence=dice.choice(["everysec", "always"]), tcp=dice.random() < 0.5, slots=slots, at=0, victim=0,
        hold_s=dice.choice([0.2, 0.6, 1.2, 2.0, 3.0]), replace_after_s=0, kill_count=0,
        trainer_delay_s=dice.choice([0.0, 0.0, 0.01]), settings=settings,
    )  # fmt: skip
    start_ms = dice.choice([0, 200, 600, 600])
    return FleetPlan(plan, operations, start_ms, dice.choice([0.1, 1.0, 5.0]), dice.random() < 0.7)


def _operation(dice: random.Random, shards: Sequence[ShardPlan], groups: int) -> Operation:
    return Operation(
        kind=dice.choice(sorted(OPERATIONS)),
        shard=dice.choice(shards).name,
        at=dice.randrange(0, max(1, groups * 2 // 3)),
        many=dice.choice([1, 2]),
        victim=dice.randrange(64),
        pause_s=dice.choice([0.0, 0.0, 0.05, 0.3, 0.6, 1.0]),
        overlaps=dice.random() < 0.6,
    )


def _batch(dice: random.Random, shards: Sequence[ShardPlan], slots: int, number: int) -> BatchPlan:
    """As many groups as keep the fleet busy for about `BATCH_S`."""
    size = dice.choice([1, 2, 4, 8])
    slowest_ms = dice.choice([100, 200, 400])
    group_s = (5 + (slowest_ms - 5) * size / (size + 1)) / 1000
    places = slots * sum(shard.replicas for shard in shards)
    groups = max(24, min(400, int(dice.uniform(*BATCH_S) * places / group_s)))
    filler = dice.choice([50, 50, 2_000])
    rows = [
        {
            "responses_create_params": {"input": "x" * filler},
            "agent_ref": {"name": shard},
            "key": f"{number}-{group}-{at}",
            "ms": dice.randrange(5, slowest_ms + 1),
            "trouble": trouble,
            "filler": filler,
        }
        for group in range(groups)
        for shard, trouble in [(dice.choice(shards).name, dice.choices(["", "once", "always"], [95, 3, 2])[0])]
        for at in range(size)
    ]
    return BatchPlan(size, rows, by_row=dice.random() < 0.35)


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

    def __init__(self, fleet_plan: FleetPlan, folder: Path) -> None:
        self.fleet_plan = fleet_plan
        self.plan = fleet_plan.plan
        self.keys = Keys(RUN)
        self.progress = Progress()
        self.strikes: list[Strike] = []
        self.complaints: list[str] = []
        self.expected = {shard.name: shard.replicas for shard in self.plan.shards}
        self.blurred: set[str] = set()
        self.kills = self.broker_restarts = 0
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
        fleet = {"placement_timeout_s": 30, "startup_timeout_s": 60, "stop_timeout_s": 15, "restart_backoff_s": 0.1}
        per_shard = {shard.name: {"commit": shard.commit, "rerun": shard.rerun} for shard in self.plan.shards}
        workers = {"slots": self.plan.slots, "drain_timeout_s": self.fleet_plan.drain_s, "health_every_s": 0.5}
        gym = {"folder": str(self._folder), "nemo_gym_log_dir": str(self._folder), "placement_strategy": "PACK"}
        return {
            "rolloutbus": {
                "run": RUN,
                "environment": f"{FleetEnvironment.__module__}:FleetEnvironment",
                "broker": broker,
                "fleet": {**fleet, "max_restarts": MAX_RESTARTS},
                "workers": {**workers, **WORKER_SETTINGS, "shards": per_shard},
            },
            "env": {"nemo_gym": {**gym, "shards": [self._shard(shard) for shard in self.plan.shards]}},
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
            if not any(words in strike.refused for words in self._refusals()):
                self.complaints.append(f"{strike.what} ended with {type(error).__name__}: {strike.refused}")
        # Not where it was cancelled: then it is what is waited for.
        strike.took_s = time.monotonic() - began

    def _refusals(self) -> tuple[str, ...]:
        killed = KILLED_IN_START if self.kills else ()
        return (*REFUSALS, *killed, *(BROKER_AWAY if self.broker_restarts else ()))

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


async def strike(stage: FleetStage, operation: Operation) -> None:
    """Wait for the moment and do it; nothing happens where the batch was over before."""
    if await stage.logged(operation.at):
        await OPERATIONS[operation.kind](stage, operation)


async def _scale(stage: FleetStage, operation: Operation, *, by: int, over_broker: bool = False) -> None:
    name, fleet = operation.shard, stage.running
    wanted = max(1, stage.expected[name] + by)
    how = "asked over the broker to scale" if over_broker else "scale"
    with stage.timed(stage.struck(operation, f"{how} {name} to {wanted}")), stage.change(name, lambda _: wanted):
        if over_broker:
            await in_thread(lambda: request_scale(fleet.broker, fleet.run, name, wanted, timeout_s=60))
        else:
            await in_thread(lambda: fleet.scale(name, wanted))


async def _up(stage: FleetStage, operation: Operation) -> None:
    await _scale(stage, operation, by=operation.many)


async def _down(stage: FleetStage, operation: Operation) -> None:
    await _scale(stage, operation, by=-operation.many)


async def _asked(stage: FleetStage, operation: Operation) -> None:
    by = operation.many if operation.victim % 3 else -operation.many
    await _scale(stage, operation, by=by, over_broker=True)


async def _drain(stage: FleetStage, operation: Operation) -> None:
    labels = [label for shard in sorted(stage.running.labels) for label in stage.running.labels[shard]]
    label = labels[operation.victim % len(labels)]
    with stage.timed(stage.struck(operation, f"drain {label}")), stage.change(label.split("/")[0], lambda n: n - 1):
        await in_thread(lambda: stage.running.drain(label))


async def _kill(stage: FleetStage, operation: Operation) -> None:
    processes = instance_pids()
    victims = [at for at in stage.running.status() if at.pid in processes]
    if victims:
        victim = victims[operation.victim % len(victims)]
        held = await stage.held_by(victim.label)
        _kill_process(stage, operation, victim.pid, f"kill {victim.label}, which is {victim.state}", held)


def _kill_process(stage: FleetStage, operation: Operation, pid: int, what: str, held: set[str] | None = None) -> None:
    """Nothing where it has gone meanwhile: its number may be somebody else's."""
    if pid in instance_pids():
        stage.kills += 1
        stage.struck(operation, what, held).took_s = 0.0
        os.kill(pid, signal.SIGKILL)


async def _scale_and_drain(stage: FleetStage, operation: Operation) -> None:
    await _together(stage, operation, _drain)


async def _scale_and_kill(stage: FleetStage, operation: Operation) -> None:
    await (_kill_newcomer(stage, operation) if operation.victim % 3 else _together(stage, operation, _kill))


async def _together(stage: FleetStage, operation: Operation, second: Fault) -> None:
    """The second thing when the scaling has just begun, or when it has just returned."""
    by = operation.many if operation.victim % 4 else -operation.many
    scaling = asyncio.create_task(_scale(stage, operation, by=by))
    if not operation.overlaps:
        await scaling
    await asyncio.sleep(operation.pause_s)
    await asyncio.gather(scaling, second(stage, operation))


async def _kill_newcomer(stage: FleetStage, operation: Operation) -> None:
    """One that is just starting, or one that is up while the other of the same change is not."""
    seen, by = (stage.up, 2) if operation.victim % 3 == 2 else (instance_pids, operation.many)
    before = seen()
    scaling = asyncio.create_task(_scale(stage, operation, by=by))
    # A process that Ray starts tells nobody.
    while not scaling.done() and seen() <= before:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(operation.pause_s)
    for pid in sorted(seen() - before)[:1]:
        labels = {at.pid: at.label for at in stage.running.status()}
        _kill_process(stage, operation, pid, f"kill a newcomer, {labels.get(pid, 'which is starting')}")
    await scaling


async def _restart_broker(stage: FleetStage, operation: Operation) -> None:
    stage.broker_restarts += 1
    with stage.timed(stage.struck(operation, f"restart the broker after {stage.plan.hold_s:g} s")):
        await asyncio.to_thread(stage.broker.kill)
        await asyncio.sleep(stage.plan.hold_s)
        await asyncio.to_thread(stage.broker.restart)


Fault = Callable[[FleetStage, Operation], Coroutine[Any, Any, None]]

OPERATIONS: dict[str, Fault] = {
    "scale-up": _up,
    "scale-down": _down,
    "drain": _drain,
    "kill": _kill,
    "scale+drain": _scale_and_drain,
    "scale+kill": _scale_and_kill,
    "scale-asked": _asked,
    "broker-restart": _restart_broker,
}

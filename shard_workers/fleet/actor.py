"""The process of one instance: an environment and a worker loop, in one thread with an event loop of their own.

A Ray actor is made of `InstanceActor`; nothing in it needs Ray. Its methods run in other threads, so it answers while
the environment starts, or blocks. It promises that no group is taken before `begin`, and that errors leave it as plain
text: an exception of somebody else's library may not even be importable where it would arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ...broker.channel import Channel
from ...broker.errors import BrokerTimeoutError, BrokerUnavailableError, EnvironmentContractError
from ...broker.settings import BrokerSettings
from ..environments.base import Environment
from ..environments.registry import load_environment
from ..plan_spec import GYM_LOG_DIR_KEY
from ..worker import ShardWorker
from ..worker_settings import WorkerSettings
from .loop_thread import LoopThread
from .output import output_kept

Result = TypeVar("Result")

BUSY = "busy"
HEALTHY = "ok"
DRAINED = "drained"
REPLACED = "replaced"
# A loop that answers within this is not blocked.
_PING_S = 1.0
# By name, as they leave the actor.
_BROKER_AWAY = frozenset({BrokerUnavailableError.__name__, BrokerTimeoutError.__name__})


class Trouble(NamedTuple):
    """An error as plain text."""

    type: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Trouble:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"

    @property
    def broker_away(self) -> bool:
        """Whether nothing is wrong but that the broker cannot be reached from there."""
        return self.type in _BROKER_AWAY


class WorkerIdentity(NamedTuple):
    """Who works in the actor now."""

    consumer: str
    incarnation: str
    host: str
    pid: int


@dataclass(frozen=True)
class InstanceSpec:
    """All that an instance is started with; plain values, but for what a config may carry for its environment."""

    run: str
    shard: str
    label: str
    environment: str
    config: Mapping[str, Any]
    broker: BrokerSettings
    workers: WorkerSettings
    working_folder: str
    import_folders: tuple[str, ...] = field(default=())


class InstanceActor:
    """Start, begin, drain, stop; every method but `wait_end` is bounded by its caller's patience.

    It has no coroutine methods: Ray would run all of its methods in one event loop then, and `wait_end` would block it.
    """

    def __init__(self) -> None:
        self._thread = LoopThread("environment")
        self._host: _Host | None = None
        self._ended = threading.Event()
        self._output = contextlib.ExitStack()

    def start(self, spec: InstanceSpec) -> Trouble | None:
        """Build the environment's stack, however long it takes; the broker must be reachable from here first."""
        try:
            _enter(spec)
            self._output.enter_context(output_kept(spec.config.get(GYM_LOG_DIR_KEY)))
            self._host = _Host(spec, load_environment(spec.environment), self._ended)
        except BaseException as error:
            return Trouble.of(error)
        return self._run(self._host.start())

    def list_entries(self) -> dict[str, list[str]] | Trouble:
        """What the environment hosts."""
        return self._run(self._started().list_entries())

    def begin(self) -> WorkerIdentity | Trouble:
        """Start to take groups."""
        return self._run(self._started().begin())

    def wait_end(self) -> str | Trouble:
        """Return when the worker loop has ended: drained, replaced (the label is another's), or with the error that
        ended it.
        """
        self._ended.wait()
        return self._host.end if self._host is not None else DRAINED

    def drain(self, timeout_s: float) -> str | Trouble:
        """Take nothing more, let what runs finish for `timeout_s`, hand the rest back; returns when the books are in
        order.
        """
        worker = self._started().worker
        if worker is None:
            return DRAINED
        self._thread.loop.call_soon_threadsafe(worker.drain, timeout_s)
        return self.wait_end()

    def stop(self) -> Trouble | None:
        """End worker and environment, in whatever state they are; safe twice."""
        if not self._thread.alive:
            return None
        trouble = self._run(self._host.stop()) if self._host is not None else None
        self._ended.set()
        self._thread.close()
        self._output.close()
        return trouble

    def health(self, timeout_s: float) -> str | Trouble:
        """`HEALTHY`, `BUSY` while the environment keeps its event loop to itself, or what `health()` raised."""
        if self._host is None or not self._thread.alive:
            return Trouble("NotStarted", "the environment is not running")
        environment = self._host.environment
        # For a check that needs nothing of the worker's loop, such as a look at a process; it then answers under any
        # load.
        if getattr(environment, "health_in_any_thread", False):
            return asyncio.run(_bounded(environment, timeout_s))
        entered = threading.Event()
        future = self._thread.submit(_told(_checked(environment, entered)))
        try:
            outcome = future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            if not entered.is_set() or not self._answers():
                return BUSY
            return Trouble("TimeoutError", f"health() did not return within {timeout_s:g} s")
        return outcome if isinstance(outcome, Trouble) else HEALTHY

    def status(self) -> dict[str, Any]:
        """Plain numbers for a person: pid, groups running, slots, how attempts ended."""
        worker = self._host.worker if self._host is not None else None
        return {"pid": os.getpid(), **(worker.statistics()._asdict() if worker is not None else {})}

    def _started(self) -> _Host:
        if self._host is None:
            raise EnvironmentContractError("the instance is not started; call start(spec) first")
        return self._host

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result | Trouble:
        return self._thread.run(_told(work))

    def _answers(self) -> bool:
        answered: Future[bool] = Future()
        self._thread.loop.call_soon_threadsafe(answered.set_result, True)
        with contextlib.suppress(FutureTimeoutError):
            return answered.result(_PING_S)
        return False


class _Host:
    """What lives in the actor's event loop. `ended` is set when the worker loop is over, and `end` tells how."""

    def __init__(self, spec: InstanceSpec, environment: Environment, ended: threading.Event) -> None:
        self.environment = environment
        self.worker: ShardWorker | None = None
        self.end: str | Trouble = DRAINED
        self._spec = spec
        self._ended = ended
        self._starting: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # Half an hour of starting is wasted where the broker cannot be reached from this machine.
        channel = await Channel.open(self._spec.broker, f"start:{self._spec.label}")
        await channel.close()
        self._starting = asyncio.create_task(_call_start(self.environment, self._spec.config))
        await self._starting

    async def list_entries(self) -> dict[str, list[str]]:
        return {name: list(types) for name, types in self.environment.list_entries().items()}

    async def begin(self) -> WorkerIdentity:
        spec = self._spec
        self.worker = ShardWorker(spec.broker, spec.run, spec.shard, spec.label, self.environment, spec.workers)
        self._working = asyncio.create_task(self._work(self.worker))
        who = self.worker.identity
        return WorkerIdentity(who.consumer, who.incarnation, who.host, who.pid)

    async def _work(self, worker: ShardWorker) -> None:
        outcome = await _told(worker.run())
        self.end = outcome if isinstance(outcome, Trouble) else REPLACED if worker.replaced else DRAINED
        self._ended.set()

    async def stop(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self.worker is not None and self._working is not None:
            self.worker.stop()
            await asyncio.wait({self._working})
        await self.environment.stop()


def _enter(spec: InstanceSpec) -> None:
    """Work where the driver works, so that relative paths and its modules are found; on another machine the folder may
    be missing.
    """
    if os.path.isdir(spec.working_folder):
        os.chdir(spec.working_folder)
    sys.path.extend(folder for folder in spec.import_folders if folder not in sys.path)


async def _told(work: Coroutine[Any, Any, Result]) -> Result | Trouble:
    """The result, or whatever was raised as text: a SystemExit in a foreign function must not end the loop."""
    try:
        return await work
    except BaseException as error:
        return Trouble.of(error)


async def _call_start(environment: Environment, config: Mapping[str, Any]) -> None:
    try:
        await environment.start(config)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the environment's start raised {type(error).__name__}({error})") from error


async def _checked(environment: Environment, entered: threading.Event) -> None:
    entered.set()
    await environment.health()


async def _bounded(environment: Environment, timeout_s: float) -> str | Trouble:
    outcome = await _told(asyncio.wait_for(environment.health(), timeout_s))
    return outcome if isinstance(outcome, Trouble) else HEALTHY

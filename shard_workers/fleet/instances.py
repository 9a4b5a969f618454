"""One instance as the fleet sees it: its label, its place, its actor, and what can be asked of it.

Every question has a time limit, and a dead actor or a failure in it comes back as `InstanceTroubleError` in plain
words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...broker.errors import FleetError
from ...broker.wording import excerpt
from ..fleet_config import FleetConfig
from ..plan_spec import ShardSpec
from .actor import InstanceActor, InstanceSpec, Trouble, WorkerIdentity
from .placement import Bundle, node_of

log = logging.getLogger("rolloutbus.fleet")

# One thread waits for the end, one may start, stop or drain; health and status must still be answered.
_CONCURRENCY = 8
# What a call needs on top of the time it may take in the actor.
_SLACK_S = 5.0
_DEATH_TIMEOUT_S = 10.0
# Ray's list of what commonly kills a process fits.
_REASON_CHARS = 450
# How often a wait for an instance is told.
TOLD_EVERY_S = 30.0
_BLOCKED = (
    "; something in its environment blocks its event loop, such as time.sleep or a request without `await` "
    "(asyncio.to_thread is for those). It is started again after blocked_timeout_s"
)


class InstanceTroubleError(FleetError):
    """An instance failed, died, or did not answer. `dead`: its process is gone. `broker_away`: only the broker is out
    of its reach.
    """

    def __init__(self, message: str, *, trace: str = "", dead: bool = False, broker_away: bool = False) -> None:
        super().__init__(message)
        self.trace = trace
        self.dead = dead
        self.broker_away = broker_away


class State(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    DRAINING = "draining"
    LOST = "lost"
    STOPPED = "stopped"


class InstanceStatus(NamedTuple):
    """A look at an instance, for people."""

    shard: str
    label: str
    state: str
    host: str
    node: str
    pid: int
    restarts: int
    ports: tuple[int, int] | None


@dataclass
class Ends:
    """How an instance ended lately: the deaths of the last hour (seconds), and how often in a row only the broker was
    out of its reach.
    """

    deaths: deque[float] = field(default_factory=deque[float])
    cut_off: int = 0


@dataclass(eq=False)
class Instance:
    """An instance; label, slot and place stay the same over all its processes."""

    shard: ShardSpec
    label: str
    slot: int
    replica_index: int | None
    bundle: Bundle
    ports: tuple[int, int] | None = None
    state: State = State.STARTING
    handle: ActorHandle[Any] | None = None
    born: asyncio.Future[Any] | None = None
    ended: asyncio.Future[Any] | None = None
    identity: WorkerIdentity | None = None
    node: str = ""
    restarts: int = 0
    ends: Ends = field(default_factory=Ends)
    watch: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"shard {self.shard.name!r}, replica {self.replica_index or 0} (instance {self.label})"

    def status(self) -> InstanceStatus:
        host, pid = (self.identity.host, self.identity.pid) if self.identity else ("", 0)
        return InstanceStatus(
            self.shard.name, self.label, str(self.state), host, self.node, pid, self.restarts, self.ports
        )


class Launcher:
    """Makes and ends the processes of instances. `base_urls` and `model_name` are the model's, known only at start."""

    def __init__(self, config: FleetConfig, base_urls: Any, model_name: str | None) -> None:
        self._config = config
        self._base_urls = base_urls
        self._model_name = model_name

    async def start(self, instance: Instance) -> None:
        """A fresh process in the instance's place, with its stack up; takes no groups yet."""
        spec = self._spec(instance)
        try:
            self._spawn(instance)
        except Exception as error:
            raise InstanceTroubleError(f"{instance.name}: Ray cannot make its process: {error}", dead=True) from None
        await self._ask(instance, "start", spec, timeout_s=self._config.fleet.startup_timeout_s)

    async def list_entries(self, instance: Instance) -> dict[str, list[str]]:
        return await self._ask(instance, "list_entries", timeout_s=self._config.fleet.health_timeout_s)

    async def begin(self, instance: Instance) -> None:
        """Let it take groups."""
        instance.node = node_of(instance.bundle)
        instance.identity = await self._ask(instance, "begin", timeout_s=self._config.fleet.startup_timeout_s)

    async def health(self, instance: Instance) -> str:
        """As the actor says it; raises what is wrong."""
        timeout_s = self._config.fleet.health_timeout_s
        return await self._ask(instance, "health", timeout_s, timeout_s=timeout_s + _SLACK_S)

    async def drain(self, instance: Instance, timeout_s: float) -> None:
        """Its groups finish within `timeout_s` or are handed back."""
        patience = timeout_s + self._config.fleet.stop_timeout_s
        await self._ask(instance, "drain", timeout_s, timeout_s=patience)

    async def stop(self, instance: Instance) -> None:
        """End stack and process; `InstanceTroubleError` if it had to be killed, which it then is."""
        # One that still waits for a node, or is gone, has nothing to stop and nobody to ask.
        if instance.born is None or not instance.born.done():
            await self.kill(instance)
        if instance.handle is None:
            return
        try:
            await self._ask(instance, "stop", timeout_s=self._config.fleet.stop_timeout_s)
        finally:
            await self.kill(instance)

    async def kill(self, instance: Instance) -> None:
        """End the process without a word, and wait until it is gone."""
        handle, instance.handle = instance.handle, None
        if handle is None:
            return
        with contextlib.suppress(RayError, ValueError):
            ray.kill(handle, no_restart=True)  # pyright: ignore[reportUnknownMemberType]
            # A call to a dead actor fails as soon as Ray knows of the death.
            await asyncio.wait({_future(handle.status.remote())}, timeout=_DEATH_TIMEOUT_S)

    def _spawn(self, instance: Instance) -> None:
        options: dict[str, Any] = {
            "num_cpus": instance.bundle.cpus,
            # Ray would bring back a process without its servers.
            "max_restarts": 0,
            "max_concurrency": _CONCURRENCY,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(instance.bundle.group, instance.bundle.index),
        }
        remote = cast("Callable[..., Any]", ray.remote)(**options)(InstanceActor)
        handle = remote.remote()
        instance.handle = handle
        instance.identity = None
        instance.born = _future(handle.status.remote())
        instance.ended = _future(handle.wait_end.remote())

    def _spec(self, instance: Instance) -> InstanceSpec:
        config, shard = self._config, instance.shard
        merged = config.instance_config(
            shard,
            instance.slot,
            replica_index=instance.replica_index,
            base_urls=self._base_urls,
            model_name=self._model_name,
        )
        folder = os.getcwd()
        return InstanceSpec(
            run=config.run, shard=shard.name, label=instance.label, environment=config.environment, config=merged,
            broker=config.broker, workers=config.workers[shard.name], working_folder=folder,
            import_folders=(folder, *(entry for entry in sys.path if entry)),
        )  # fmt: skip

    async def _ask(self, instance: Instance, method: str, *args: Any, timeout_s: float) -> Any:
        if instance.handle is None:
            raise InstanceTroubleError(f"{instance.name} has no process", dead=True)
        answer = _future(getattr(instance.handle, method).remote(*args))
        began = time.monotonic()
        while not answer.done() and (waited := time.monotonic() - began) < timeout_s:
            if waited >= TOLD_EVERY_S:
                log.warning("%s: %s is not done after %.0f s%s", instance.name, method, waited, _why(instance, method))
            await asyncio.wait({answer}, timeout=min(TOLD_EVERY_S, timeout_s - waited))
        if not answer.done():
            raise InstanceTroubleError(
                f"{instance.name} did not finish {method} within {timeout_s:g} s{_why(instance, method)}"
            )
        return told(instance, method, answer)


def _why(instance: Instance, method: str) -> str:
    if instance.born is None or instance.born.done():
        return _BLOCKED if method == "health" else ""
    return f"; its process has not begun: is there a node with {instance.bundle.cpus:g} CPUs free?"


def told(instance: Instance, method: str, answer: asyncio.Future[Any]) -> Any:
    """What an actor's call gave, its troubles raised."""
    error = answer.exception()
    if isinstance(error, RayActorError):
        raise InstanceTroubleError(
            f"{instance.name}: its process died during {method} ({_first_words(error)})", dead=True
        )
    if error is not None:
        raise InstanceTroubleError(f"{instance.name}: {method} failed: {_first_words(error)}", trace=str(error))
    result = answer.result()
    if isinstance(result, Trouble):
        raise InstanceTroubleError(
            f"{instance.name}: {method} failed: {result}", trace=result.traceback, broker_away=result.broker_away
        )
    return result


def _future(ref: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    # Not every answer is waited for to the end; one that nobody takes must not be reported as forgotten.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _first_words(error: BaseException) -> str:
    """Ray's messages are pages long; the reason stands in the last line that is not a listing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith(("The actor is dead", "The actor died", "Worker"))]
    return excerpt(" ".join(dict.fromkeys(reasons or lines[:1])), _REASON_CHARS) or type(error).__name__

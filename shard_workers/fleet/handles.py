"""Environments that a job holds in its own hands: one that reads as a fleet, and the end of all of them.

A bare actor handle is served by the worker loop in the caller's process, so a job that is not sharded yet takes the
same path through the broker. Who made an actor may have it killed; what owns others, a fleet or a client, is asked to
end itself and never killed.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, cast

import ray
from ray.actor import ActorHandle

from ...broker.errors import ConfigError, FleetError
from ...broker.keys import ANY_ROUTE, UNSHARDED_SHARD
from ...broker.settings import BrokerSettings, broker_url
from ..worker_settings import WorkerSettings
from .fleet import ShardFleet
from .handle_engine import HandleEngine
from .loop_thread import LoopThread

log = logging.getLogger("rolloutbus.fleet")

SHUTDOWN_TIMEOUT_S: Final = 60.0
_OWN_ENDS = ("shutdown", "close_now", "close")


def as_shard_fleet(
    environment: Any,
    broker: BrokerSettings | str | None = None,
    run: str = "default",
    *,
    workers: WorkerSettings | None = None,
    arguments: Sequence[Any] = (),
) -> ShardFleet | HandleFleet:
    """A fleet stays itself; a handle with a streaming `run_rollouts` becomes a fleet of one shard and one replica.

    Given a broker, the handle serves the run at once, as `serve` does. `arguments` follow the rows in each call of
    `run_rollouts`, such as a tokenizer. Raises `ConfigError` for anything else, `FleetError` when the run has a fleet
    already.
    """
    if isinstance(environment, ShardFleet | HandleFleet):
        return environment
    if not callable(getattr(environment, "run_rollouts", None)):
        raise ConfigError(
            f"{type(environment).__name__} is no fleet and has no run_rollouts; give a ShardFleet, or the handle of an "
            "actor that streams rollouts"
        )
    fleet = HandleFleet(environment, workers or WorkerSettings(), arguments)
    if broker is not None:
        fleet.serve(broker, run)
    return fleet


def shutdown_environments(*maps: Mapping[str, Any] | None, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
    """End each distinct environment of all maps once, also where two maps share it.

    An actor's `shutdown` is called, and the actor killed if that fails or takes longer than `timeout_s`. Everything
    else is asked by its own `shutdown` or `close`. All are ended before a `FleetError` names those that could not end
    themselves.
    """
    distinct: dict[object, tuple[str, Any]] = {}
    for environments in maps:
        for name, environment in (environments or {}).items():
            if environment is not None:
                distinct.setdefault(_identity(environment), (name, environment))
    # All actors hear of it first, so that ten that hang cost one timeout.
    actors = [(name, known, _ask_actor(known)) for name, known in distinct.values() if _is_actor(known)]
    owners = [(name, known) for name, known in distinct.values() if not _is_actor(known)]
    problems = [problem for name, owner in owners if (problem := _end_owner(name, owner))]
    deadline = time.monotonic() + timeout_s
    for name, handle, answer in actors:
        _await_actor(name, handle, answer, max(0.0, deadline - time.monotonic()))
    if problems:
        raise FleetError("; ".join(problems))


def _identity(environment: Any) -> object:
    # Two handles of one actor are two objects.
    return environment._actor_id if _is_actor(environment) else id(environment)


def _is_actor(environment: Any) -> bool:
    return isinstance(environment, ActorHandle)


def _end_owner(name: str, environment: Any) -> str | None:
    ask = next((method for end in _OWN_ENDS if callable(method := getattr(environment, end, None))), None)
    if ask is None:
        return f"{name}: {type(environment).__name__} has neither shutdown nor close; end it yourself"
    try:
        answer: object = ask()
        if inspect.isawaitable(answer):
            _run_elsewhere(cast("Awaitable[object]", answer))
    except Exception as error:
        log.exception("%s: %s could not shut itself down", name, type(environment).__name__)
        return f"{name}: {type(error).__name__}: {error}"
    return None


def _run_elsewhere(answer: Awaitable[object]) -> None:
    """In a thread of its own, since the caller may stand in an event loop."""

    async def awaited() -> None:
        await answer

    thread = LoopThread("shutdown")
    try:
        thread.run(awaited())
    finally:
        thread.close()


def _ask_actor(handle: Any) -> Any:
    """The coming answer to `shutdown`; None where it has no such method."""
    shutdown = getattr(handle, "shutdown", None)
    return shutdown.remote() if shutdown is not None else None


def _await_actor(name: str, handle: Any, answer: Any, timeout_s: float) -> None:
    try:
        if answer is None:
            raise AttributeError("it has no method shutdown")
        ray.get(answer, timeout=timeout_s)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        log.warning("%s: its actor did not shut down (%s); it is killed", name, reason)
        ray.kill(handle)  # pyright: ignore[reportUnknownMemberType]


class HandleFleet:
    """One bare handle as a fleet: shard `nemo_gym`, one replica, every route. Its worker loop runs in a thread here."""

    def __init__(self, handle: Any, workers: WorkerSettings, arguments: Sequence[Any]) -> None:
        self._handle = handle
        self._workers = workers
        self._arguments = arguments
        self._thread: LoopThread | None = None
        self._engine: HandleEngine | None = None
        self._shut_down = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def route_map(self) -> Mapping[str, str]:
        return MappingProxyType({ANY_ROUTE: UNSHARDED_SHARD})

    @property
    def labels(self) -> dict[str, list[str]]:
        """Shard → labels of its instances; none where the worker loop was given up."""
        return {UNSHARDED_SHARD: [] if self._engine is not None and self._engine.lost else [UNSHARDED_SHARD]}

    def serve(self, broker: BrokerSettings | str | None = None, run: str = "default") -> None:
        """Publish the one route and take groups; the broker is the one given, else `REDIS_URL`. Raises `FleetError` for
        a taken run.
        """
        if self._shut_down or self._thread is not None:
            raise FleetError(
                f"the handle serves a run already or is shut down; make another fleet of it for run {run!r}"
            )
        self._thread = LoopThread(f"rolloutbus-fleet-{run}")
        try:
            self._thread.run(self._start(_settings(broker), run))
        except BaseException:
            self._thread.close()
            self._thread = None
            raise

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Drain, take the run's keys off the broker, then shut the handle down as `shutdown_environments` does; safe
        twice.
        """
        if self._shut_down:
            return
        self._shut_down = True
        try:
            self._end_serving()
        finally:
            if callable(getattr(self._handle, "shutdown", None)):
                shutdown_environments({UNSHARDED_SHARD: self._handle}, timeout_s=timeout_s)

    async def _start(self, settings: BrokerSettings, run: str) -> None:
        self._engine = HandleEngine(self._handle, self._arguments, self._workers, settings, run)
        await self._engine.start()

    def _end_serving(self) -> None:
        if self._thread is None or self._engine is None:
            return
        try:
            self._thread.run(self._engine.leave())
        finally:
            self._thread.close()


def _settings(broker: BrokerSettings | str | None) -> BrokerSettings:
    if isinstance(broker, BrokerSettings):
        return broker
    url = broker_url(broker)
    return BrokerSettings(url=url) if url else BrokerSettings()

"""The `actor_class` environment: a class of the trainer's own, with the contract of NeMo RL's Gym actor, hosted
without Ray.

The class does what it does there (start servers, run rollouts, turn token ids into tensors), where the rollout runs
and not where the trainer does. Promises the tokenizer once at the start and never per call, one group identity per
attempt, that a closed call has closed the class's own stream, and that no rollout holds up a question for its health.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from ...broker.errors import ClosedError, ConfigError, EnvironmentContractError
from ...broker.settings import settings_from
from .base import Result, Row, RowOutcome
from .identity import WORKER_GROUP_ID, restore, stamped
from .import_path import import_object

T = TypeVar("T")

PREFIX = "rolloutbus_"
# The class names its times with a prefix that the trainer's batches do not know here.
_TIMER = "actor"
# Waiting is measured by the worker, as a union: the class's own sum counts what overlaps twice.
_MEASURED_ELSEWHERE = frozenset({"await_results"})
_TIMINGS_KEPT = 4096
# A thread is made only where none is idle; these bounds are there because an executor wants one.
_MOST_STEPS: Final = 8192
_MOST_CALLS: Final = 64
_NEEDED = ("_spinup", "list_entries", "run_rollouts", "health_check", "shutdown")


class ActorSettings(BaseModel):
    """Each is written with the prefix `rolloutbus_` in a shard's config."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    # `package.module:Class`
    actor_class: str
    # An object, the `package.module:function` that makes one, or a name for `transformers`.
    tokenizer: Any = None


class _Threads:
    """Where the class's plain methods run: steps of rollouts apart from calls.

    Neither is asyncio's own pool. It has a few threads more than there are CPUs, so that rollouts which block them
    would starve health checks, and the look-up of the broker's name when a worker connects again.
    """

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(_MOST_STEPS, "actor-class-step")
        self._calls = ThreadPoolExecutor(_MOST_CALLS, "actor-class-call")

    def step(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return _submitted(self._steps, work, *arguments)

    def call(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return _submitted(self._calls, work, *arguments)

    def shutdown(self) -> None:
        """Take nothing more; what still runs is left to end by itself."""
        for pool in (self._steps, self._calls):
            pool.shutdown(wait=False)


def _submitted(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    try:
        return asyncio.wrap_future(pool.submit(contextvars.copy_context().run, work, *arguments))
    except RuntimeError:
        raise ClosedError("the actor_class environment was stopped") from None


class ActorClassEnvironment:
    """Hosts one instance of the class; see `base.Environment` for the contract."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._tokenizer: Any = None
        self._threads = _Threads()
        self._calls = 0
        self._timings: OrderedDict[str, dict[str, float]] = OrderedDict()

    async def start(self, config: Mapping[str, Any]) -> None:
        """Make the class from `{"model_name", "base_urls", "initial_global_config_dict", port range}`, then run its
        `_spinup`.

        Raises `ConfigError` for a class that cannot be imported or lacks a method.
        """
        if self._actor is not None:
            raise EnvironmentContractError("this environment is started already; stop it before starting it again")
        own = {key.removeprefix(PREFIX): value for key, value in config.items() if key.startswith(PREFIX)}
        settings = settings_from(ActorSettings, own, "env.nemo_gym (rolloutbus_…)")
        made = actor_class(settings.actor_class)
        self._threads = _Threads()
        self._tokenizer = await self._threads.call(load_tokenizer, settings.tokenizer)
        self._actor = made(actor_config({key: value for key, value in config.items() if not key.startswith(PREFIX)}))
        if hasattr(self._actor, "set_tokenizer"):
            await _call(self._threads, self._actor.set_tokenizer, self._tokenizer)
        await _call(self._threads, self._actor._spinup)
        self._entries: dict[str, list[str]] = await _call(self._threads, self._actor.list_entries)

    def list_entries(self) -> dict[str, list[str]]:
        """What the class says it hosts."""
        self._running()
        return {name: list(kinds) for name, kinds in self._entries.items()}

    async def run_rollouts(self, rows: Sequence[Row]) -> AsyncGenerator[RowOutcome]:
        """Run one group through the class's streaming `run_rollouts`."""
        actor = self._running()
        self._calls += 1
        by_index = {row["_rowidx"]: row for row in rows}
        arguments = self._arguments(actor.run_rollouts, stamped(rows, self._calls))
        stream = _items(self._threads, actor.run_rollouts, arguments)
        try:
            async for item in stream:
                index, result, timing = _parts(item)
                if timing:
                    self._note(str(rows[0].get(WORKER_GROUP_ID)), timing)
                if index not in by_index:
                    raise EnvironmentContractError(
                        f"the class gave a result for row {index!r}, which is not in this group"
                    )
                yield by_index[index], _restored(result, by_index[index])
        finally:
            await stream.aclose()

    async def health(self) -> None:
        """Raise what the class's `health_check` raises."""
        await _call(self._threads, self._running().health_check)

    async def stop(self) -> None:
        """Run the class's `shutdown`, also after a failed start."""
        actor, self._actor = self._actor, None
        try:
            if actor is not None:
                await _call(self._threads, actor.shutdown)
        finally:
            self._threads.shutdown()

    def take_timing(self, group_id: str) -> dict[str, float]:
        """The seconds that the class reported for this attempt, by name, once; see `base.ReportsTiming`."""
        return self._timings.pop(group_id, {})

    def _running(self) -> Any:
        if self._actor is None:
            raise ClosedError("the actor_class environment is not started, or was stopped; call start(config) first")
        return self._actor

    def _arguments(self, method: Callable[..., Any], rows: list[Row]) -> list[Any]:
        """By position, as NeMo RL calls it; a class that has `set_tokenizer` takes none here."""
        takes_tokenizer = "tokenizer" in inspect.signature(method).parameters
        return [rows, self._tokenizer, _TIMER] if takes_tokenizer else [rows, _TIMER]

    def _note(self, group_id: str, timing: Mapping[str, Any]) -> None:
        seconds = {str(name).removeprefix(f"{_TIMER}/"): value for name, value in timing.items()}
        # Percentages are made from totals, over the whole batch.
        self._timings[group_id] = {
            name: float(value)
            for name, value in seconds.items()
            if not name.endswith("_pct") and name not in _MEASURED_ELSEWHERE and _is_number(value)
        }
        while len(self._timings) > _TIMINGS_KEPT:
            self._timings.popitem(last=False)


def actor_class(spec: str) -> Callable[[dict[str, Any]], Any]:
    """The class at `package.module:Class`; one that is decorated with `ray.remote` is taken out of its wrapping."""
    found = import_object(spec, "rolloutbus_actor_class")
    metadata: Any = getattr(found, "__ray_metadata__", None)
    made: Any = (
        found if metadata is None else getattr(metadata.modified_class, "__ray_actor_class__", metadata.modified_class)
    )
    if not isinstance(made, type):
        raise ConfigError(
            f"rolloutbus_actor_class: {spec} is no class but {type(made).__name__}; name the class itself"
        )
    missing = [name for name in _NEEDED if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            f"rolloutbus_actor_class: {spec} lacks {', '.join(missing)}, which the contract of NeMo RL's Gym actor has"
        )
    return cast("Callable[[dict[str, Any]], Any]", made)


def load_tokenizer(source: Any) -> Any:
    """`source` itself, or what it names: a function to call, or a model of `transformers`."""
    if not isinstance(source, str):
        return source
    if ":" in source:
        return import_object(source, "rolloutbus_tokenizer")()
    transformers = import_object("transformers:AutoTokenizer", "rolloutbus_tokenizer")
    return transformers.from_pretrained(source)


def actor_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's argument: the model beside the shard's Gym config, as NeMo RL lays it out."""
    urls: Any = config.get("policy_base_url")
    ports = {key: config[key] for key in ("port_range_low", "port_range_high") if config.get(key) is not None}
    apart = {"policy_base_url", "policy_model_name", "config_dir", *ports}
    return {
        "model_name": config.get("policy_model_name"),
        "base_urls": [urls] if isinstance(urls, str) else list(urls or []),
        "initial_global_config_dict": {key: value for key, value in config.items() if key not in apart},
        **ports,
    }


async def _call(threads: _Threads, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call something of the class: a plain function in a thread, since it may take minutes, and a coroutine function
    here.
    """
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    answer = await threads.call(method, *arguments)
    return await answer if inspect.isawaitable(answer) else answer


async def _items(threads: _Threads, method: Callable[..., Any], arguments: list[Any]) -> AsyncGenerator[Any]:
    """What the class's `run_rollouts` yields, whether it is an async generator, a generator, or a coroutine that
    gives either.
    """
    stream = method(*arguments)
    if inspect.isawaitable(stream):
        stream = await stream
    if not hasattr(stream, "__aiter__"):
        stream = _in_thread(threads, iter(stream))
    try:
        async for item in stream:
            yield item
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


async def _in_thread(threads: _Threads, items: Iterator[Any]) -> AsyncGenerator[Any]:
    """A plain iterator, each step of which may block. One whose step still runs is left to end by itself."""
    end = object()
    try:
        while (item := await asyncio.shield(threads.step(next, items, end))) is not end:
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            # Once the environment was stopped there is no thread left to close it in.
            with contextlib.suppress(ClosedError):
                await threads.step(_close_when_idle, close)


def _close_when_idle(close: Callable[[], None]) -> None:
    try:
        close()
    except ValueError:
        # The step that was left behind still runs; nothing more is asked of this generator.
        return


def _parts(item: Any) -> tuple[Any, Any, Mapping[str, Any] | None]:
    """Index, result and timing; newer NeMo RL puts the agent between the first two."""
    parts: list[Any] = list(cast("tuple[Any, ...]", item)) if isinstance(item, tuple) else []
    if len(parts) not in (3, 4):
        raise EnvironmentContractError(
            f"the class yielded {type(cast(object, item)).__name__}; it must yield (row_index, result, timing or None)"
        )
    index, *_, result, timing = parts
    return index, result, timing


def _restored(result: Any, row: Row) -> Result | BaseException:
    """The caller's group identity put back, also where NeMo RL keeps Gym's own result."""
    if not isinstance(result, dict):
        return cast(Result, result)
    restored = restore(cast(Result, result), row)
    if isinstance(restored.get("full_result"), dict):
        restore(restored["full_result"], row)
    return restored


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

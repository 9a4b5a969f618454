"""The `functions` environment: entries of the config name async Python callables, one call is one rollout.

It owns the tasks of the rollouts that run. Promises completion order, that one row's failure never ends its
siblings, that closing or cancelling a call ends its tasks, and that no function can end the stream
silently, whatever it raises.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import reprlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from ...broker.errors import ClosedError, ConfigError, EnvironmentContractError, RouteError
from ...broker.routes import route_of
from ..plan_text import names
from .base import Result, Row, RowOutcome
from .config_files import merge_config_paths
from .entry_shapes import is_of_gym
from .exits import EXITS, contained
from .group_barrier import GroupBarrier, GroupSeat, Slot
from .import_path import import_object, search_first
from .policy import Policy, policy_from_config

log = logging.getLogger(__name__)

SERVER_TYPE = "responses_api_agents"
# Long enough for a function to close its connections, short enough that a drain does not look stuck.
CANCEL_GRACE_S = 10.0

# A policy may be a mapping too, and nothing else tells it from an entry.
_NOT_ENTRIES = frozenset({"policy"})
_OWN_KEYS = frozenset({"function", "max_concurrency"})


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What a rollout function gets beside its row: the model, its entry's other options, and its siblings."""

    policy: Policy
    options: Mapping[str, Any]
    entry: str
    group: GroupSeat


RolloutFunction: TypeAlias = Callable[[Row, RolloutContext], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    spec: str
    function: RolloutFunction
    options: Mapping[str, Any]
    limit: asyncio.Semaphore | None


@dataclass(frozen=True, slots=True)
class _Stack:
    entries: Mapping[str, _Entry]
    policy: Policy


class FunctionsEnvironment:
    """Runs `module:callable` rollouts in this process; see `base.Environment` for the contract."""

    def __init__(self) -> None:
        self._stack: _Stack | None = None
        self._tasks: set[asyncio.Task[Result]] = set()

    async def start(self, config: Mapping[str, Any]) -> None:
        """Merge `config_paths`, import every entry's function, then open the policy; `ConfigError` if any
        cannot be.
        """
        if self._stack is not None:
            raise EnvironmentContractError("this environment is started already; stop it before starting it again")
        merged = merge_config_paths(config)
        search_first(_import_folders(merged))
        entries = _read_entries(merged)
        # The policy last: a function that does not import then leaves no connection open.
        self._stack = _Stack(entries, policy_from_config(merged))

    def list_entries(self) -> dict[str, list[str]]:
        """Every entry that names a function, as an agent that rows can route to."""
        return {name: [SERVER_TYPE] for name in self._running().entries}

    async def run_rollouts(self, rows: Sequence[Row]) -> AsyncGenerator[RowOutcome]:
        """Run all rows side by side; each function gets its own copy of the row's dicts and lists."""
        stack = self._running()
        barrier = GroupBarrier([row.get("_rowidx") for row in rows])
        outcomes: asyncio.Queue[RowOutcome] = asyncio.Queue()
        tasks = [self._launch(stack, row, barrier, position, outcomes) for position, row in enumerate(rows)]
        try:
            for _ in tasks:
                yield await outcomes.get()
        finally:
            await _end(tasks)

    async def health(self) -> None:
        """Raise `ClosedError` unless started."""
        self._running()

    async def stop(self) -> None:
        """Cancel what runs, whose rows then fail with `ClosedError`, and close the policy."""
        stack, self._stack = self._stack, None
        try:
            await _end(self._tasks)
        finally:
            if stack is not None:
                await stack.policy.aclose()

    def _running(self) -> _Stack:
        if self._stack is None:
            raise ClosedError("the functions environment is not started, or was stopped; call start(config) first")
        return self._stack

    def _launch(
        self,
        stack: _Stack,
        row: Row,
        barrier: GroupBarrier,
        position: int,
        outcomes: asyncio.Queue[RowOutcome],
    ) -> asyncio.Task[Result]:
        def settle(done: asyncio.Task[Result]) -> None:
            self._tasks.discard(done)
            outcome = self._outcome(done)
            outcomes.put_nowait((row, outcome))
            # After the outcome, so that the culprit is reported before the siblings it takes along.
            barrier.leave(position, outcome if isinstance(outcome, BaseException) else None)

        task = asyncio.create_task(_run_row(stack, row, barrier, position), name=f"rollout of row {row.get('_rowidx')}")
        self._tasks.add(task)
        # A callback and not code inside the task, because one cancelled before its first step never runs it.
        task.add_done_callback(settle)
        return task

    def _outcome(self, done: asyncio.Task[Result]) -> Result | BaseException:
        try:
            return done.result()
        except asyncio.CancelledError as error:
            if self._stack is None:
                return ClosedError(f"the environment was stopped during the {done.get_name()}")
            cancelled = EnvironmentContractError(
                f"the {done.get_name()} raised CancelledError though nobody cancelled it; "
                f"catch it in the function where something awaited may be cancelled"
            )
            cancelled.__cause__ = error
            return cancelled
        except BaseException as error:
            return error


async def _run_row(stack: _Stack, row: Row, barrier: GroupBarrier, position: int) -> Result:
    entry = _entry_of(row, stack.entries)
    slot = Slot(entry.limit)
    context = RolloutContext(stack.policy, entry.options, entry.name, barrier.seat(position, slot))
    await slot.acquire()
    try:
        result = cast(object, await entry.function(_private_copy(row), context))
    except EXITS as error:
        raise contained(error, f"{entry.spec} (entry {entry.name!r})") from error
    finally:
        slot.release()
    if (wrong := _what_is_wrong(result)) is not None:
        raise EnvironmentContractError(
            f"{entry.spec} (entry {entry.name!r}) returned {wrong} "
            f"for row {row.get('_rowidx')}; return a dict with a number as its 'reward'"
        )
    return cast(Result, result)


def _what_is_wrong(result: object) -> str | None:
    """What a function must not return, in words. A reward that is missing would be trained on as nothing, or as 0."""
    if not isinstance(result, dict):
        return type(result).__name__
    fields = cast("Mapping[object, object]", result)
    # NeMo RL's shape has it there, and so `run` looks there too.
    if "reward" not in fields and isinstance(inner := fields.get("full_result"), Mapping):
        fields = cast("Mapping[object, object]", inner)
    if "reward" not in fields:
        return f"a dict without 'reward' (its keys: {names(map(str, fields))})"
    reward = fields["reward"]
    return None if _is_real_number(reward) else f"the reward {reprlib.repr(reward)}, which is no number,"


def _is_real_number(value: object) -> bool:
    """Any scalar will do, of numpy and torch too; their strings and arrays can be floats by name only."""
    if isinstance(value, str | bytes | complex) or getattr(value, "ndim", 0):
        return False
    return hasattr(type(value), "__float__")


def _entry_of(row: Row, entries: Mapping[str, _Entry]) -> _Entry:
    route = route_of(row)
    if route not in entries:
        hosted = ", ".join(sorted(entries))
        raise RouteError(f"row {row.get('_rowidx')} routes to {route!r}, which is not hosted here; hosted: {hosted}")
    return entries[route]


def _private_copy(value: Any) -> Any:
    # Siblings decoded from one message share their prompt's objects; arrays and other leaves may stay shared.
    if isinstance(value, dict):
        return {key: _private_copy(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        items = cast(list[Any], value)
        return [_private_copy(item) if isinstance(item, dict | list) else item for item in items]
    return value


async def _end(tasks: Collection[asyncio.Task[Result]]) -> None:
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    if pending:
        _, pending = await asyncio.wait(pending, timeout=CANCEL_GRACE_S)
    if pending:
        names = ", ".join(sorted(task.get_name() for task in pending))
        log.error("ignored its cancellation for %.0f s and is left running: %s", CANCEL_GRACE_S, names)


def _import_folders(config: Mapping[str, Any]) -> list[Path]:
    listed: object = config.get("python_path") or []
    if not isinstance(listed, list):
        raise ConfigError(f"python_path: {listed!r} is no list of folders")
    base = Path(str(config.get("config_dir") or "."))
    return [*((base / str(folder)).resolve() for folder in cast(list[object], listed)), Path.cwd()]


def _read_entries(config: Mapping[str, Any]) -> dict[str, _Entry]:
    mappings = {
        name: cast(dict[str, Any], value)
        for name, value in config.items()
        if isinstance(value, dict) and name not in _NOT_ENTRIES
    }
    entries = {name: _read_entry(name, options) for name, options in mappings.items() if "function" in options}
    if not entries:
        raise ConfigError(_without_functions(mappings))
    return entries


def _without_functions(mappings: Mapping[str, Mapping[str, Any]]) -> str:
    of_gym = [name for name, options in mappings.items() if is_of_gym(options)]
    if of_gym:
        return (
            f"no entry has a key 'function', and {names(of_gym)} {'are entries' if of_gym[1:] else 'is an entry'} of "
            "NeMo Gym; say `rolloutbus.environment: nemo_gym` for those, or name a function as function: "
            "package.module:callable"
        )
    seen = f" (without it: {', '.join(mappings)})" if mappings else ""
    return f"no entry has a key 'function'{seen}; name one as function: package.module:callable"


def _read_entry(name: str, config: Mapping[str, Any]) -> _Entry:
    spec = config["function"]
    function = import_object(spec, f"{name}.function")
    _check_callable(function, f"{name}.function: {spec}")
    options = {key: value for key, value in config.items() if key not in _OWN_KEYS}
    return _Entry(name, str(spec), function, options, _read_limit(name, config.get("max_concurrency")))


def _check_callable(function: object, where: str) -> None:
    call: object = inspect.getattr_static(type(function), "__call__", None)
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)):
        raise ConfigError(f"{where} is no async function; define it as async def f(row, context) -> dict")
    try:
        inspect.signature(cast("RolloutFunction", function)).bind({}, None)
    except TypeError as error:
        raise ConfigError(f"{where} cannot be called with (row, context): {error}") from None


def _read_limit(name: str, value: object) -> asyncio.Semaphore | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}.max_concurrency: {value!r} is no integer of 1 or more")
    return asyncio.Semaphore(value)

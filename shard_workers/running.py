"""Running one attempt: the rows go through the environment, each result is checked and handed on as it comes.

Nothing here knows of leases or of the broker. A result is given on by its position in the group; whatever the
environment does against its contract becomes an error of this attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from ..broker.errors import EnvironmentContractError
from .environments.base import Environment, Row
from .environments.exits import EXITS, contained, text_of

# An environment whose rows are ready one after another would keep the event loop, and its first row, until the last.
GIVE_WAY_S = 0.001
OnResult = Callable[[int, Mapping[str, Any]], Awaitable[None] | None]


class EnvironmentCancelledError(EnvironmentContractError):
    """The environment raised `CancelledError` although nobody cancelled it."""


async def run_rows(environment: Environment, rows: Sequence[Row], on_result: OnResult, *, independent: bool) -> None:
    """Run `rows` of one group; calls `on_result(position, result)` in completion order, once per row. Where that gives
    something to wait for, the environment is asked for its next row only then.

    With `independent` rows a failed one lets its siblings finish, else it ends the attempt at once. Raises the row's
    exception, or `EnvironmentContractError` for foreign, repeated or missing rows and for results that are none.
    """
    outcomes = _Outcomes(rows)
    try:
        stream = _as_stream(environment.run_rollouts(rows))
        try:
            failed = await _give_on(stream, outcomes, on_result, independent=independent)
        finally:
            await _close(stream)
    except EXITS as error:
        raise contained(error, "the environment") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EnvironmentCancelledError(
            "the environment raised CancelledError by itself; let it raise what went wrong instead"
        ) from None
    if failed is not None:
        raise failed if isinstance(failed, Exception) else _as_error(failed)
    outcomes.require_all()


async def _give_on(
    stream: AsyncIterator[Any], outcomes: _Outcomes, on_result: OnResult, *, independent: bool
) -> BaseException | None:
    """Results as they come; gives the first row's failure, if any."""
    failed: BaseException | None = None
    give_way_at = time.monotonic() + GIVE_WAY_S
    async for item in stream:
        position, result = outcomes.check(item)
        if isinstance(result, BaseException):
            failed = result if failed is None else failed
            if not independent:
                break
            continue
        room = on_result(position, result)
        # Handed on: a group that waits does not keep its last row's numbers alive, which would push others out of the
        # processor's cache.
        del item, result
        if room is not None:
            await room
        elif time.monotonic() > give_way_at:
            await asyncio.sleep(0)
            give_way_at = time.monotonic() + GIVE_WAY_S
    return failed


class _Outcomes:
    """What the environment has still to give back."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._positions = {row["_rowidx"]: at for at, row in enumerate(rows)}
        self._open = set(self._positions)

    def check(self, item: Any) -> tuple[int, dict[str, Any] | BaseException]:
        """The position of the row that came back, and its result; raises what is wrong with the item."""
        pair = cast("tuple[Any, ...]", item) if isinstance(item, tuple) else ()
        if len(pair) != 2:
            raise EnvironmentContractError(f"run_rollouts yielded {_short(item)}; it must yield (row, result)")
        row, result = pair
        index = cast("dict[str, Any]", row).get("_rowidx") if isinstance(row, dict) else row
        if type(index) is not int or index not in self._positions:
            raise EnvironmentContractError(
                f"a result came back for row index {_short(index)}, which is not in this group "
                f"({_span(self._positions)}); give back the row that was handed in"
            )
        if index not in self._open:
            raise EnvironmentContractError(f"row {index} came back twice; yield each row once")
        if not isinstance(result, (dict, BaseException)):
            raise EnvironmentContractError(
                f"row {index} came back with {_short(result)} as its result; it must be a dict"
            )
        self._open.discard(index)
        return self._positions[index], cast("dict[str, Any] | BaseException", result)

    def require_all(self) -> None:
        if self._open:
            raise EnvironmentContractError(
                f"the environment ended without a result for rows {_span(self._open)}; it must yield every row once"
            )


def _as_error(failed: BaseException) -> EnvironmentContractError:
    error = EnvironmentContractError(f"a row failed with {type(failed).__name__}({text_of(failed)})")
    error.__cause__ = failed
    return error


def _as_stream(stream: Any) -> AsyncIterator[Any]:
    if not hasattr(stream, "__aiter__"):
        if asyncio.iscoroutine(stream):
            stream.close()
        raise EnvironmentContractError(
            f"run_rollouts returned {type(stream).__name__}; it must return an async iterator of (row, result)"
        )
    return stream


async def _close(stream: Any) -> None:
    """Close the stream if it can be, so that leaving early ends the environment's tasks."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


def _span(indices: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(indices)[:20]))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

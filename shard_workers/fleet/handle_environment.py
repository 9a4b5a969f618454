"""The environment contract around one handle that streams rollouts: a Ray actor's, or any object's.

The rows reach it with an identity of this attempt, and what the caller had in those fields comes back. Promises that a
call which is closed has its stream in the actor cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from ...broker.errors import EnvironmentContractError
from ..environments.base import Result, Row, RowOutcome
from ..environments.identity import restore, stamped


class HandleEnvironment:
    """`run_rollouts(rows, *arguments)` of the handle yields `(row or its index, result)`, in any order.

    A timing may follow, and an agent stand before the result, as in NeMo RL.
    """

    def __init__(self, handle: Any, arguments: Sequence[Any]) -> None:
        self._handle = handle
        self._arguments = tuple(arguments)
        self._calls = 0

    async def start(self, config: Mapping[str, Any]) -> None:
        """Its owner has started it."""

    def list_entries(self) -> dict[str, list[str]]:
        return {}

    async def run_rollouts(self, rows: Sequence[Row]) -> AsyncGenerator[RowOutcome]:
        self._calls += 1
        by_index: dict[object, Row] = {row["_rowidx"]: row for row in rows}
        stream = self._stream(stamped(rows, self._calls))
        try:
            async for item in _items(stream):
                index, result = _parts(item)
                if index not in by_index:
                    raise EnvironmentContractError(
                        f"run_rollouts gave a result for row {index!r}, which is not of this group"
                    )
                row = by_index[index]
                yield row, restore(cast(Result, result), row) if isinstance(result, dict) else result
        finally:
            await _abandon(stream)

    async def health(self) -> None:
        """A call may queue behind rollouts, so its answer would say nothing; a dead actor fails the rollouts."""

    async def stop(self) -> None:
        """Its owner stops it."""

    def _stream(self, rows: list[Row]) -> Any:
        if isinstance(self._handle, ActorHandle):
            method: Any = cast("Any", self._handle).run_rollouts
            return method.options(num_returns="streaming").remote(rows, *self._arguments)
        return self._handle.run_rollouts(rows, *self._arguments)


def _parts(item: object) -> tuple[object, Any]:
    parts = list(cast("Sequence[Any]", item)) if isinstance(item, tuple | list) else []
    if len(parts) not in (2, 3, 4):
        raise EnvironmentContractError(
            f"run_rollouts yielded {type(cast(object, item)).__name__}; it must yield (row_index, result) or "
            "(row_index, result, timing)"
        )
    first: object = parts[0]
    index = cast("Mapping[str, Any]", first).get("_rowidx") if isinstance(first, Mapping) else first
    return index, parts[2 if len(parts) == 4 else 1]


async def _items(stream: Any) -> AsyncIterator[object]:
    if isinstance(stream, AsyncIterator):
        async for item in cast("AsyncIterator[Any]", stream):
            yield await item if isinstance(item, ray.ObjectRef) else item
        return
    for item in cast("Iterable[object]", stream):
        yield item
        # A plain generator would keep the loop to itself.
        await asyncio.sleep(0)


async def _abandon(stream: Any) -> None:
    """End what still runs of it."""
    # Ray's own generator says that it is an async one, and cannot be closed.
    if isinstance(stream, cast("Any", ray).ObjectRefGenerator):
        if not stream.is_finished():
            ray.cancel(stream)  # pyright: ignore[reportUnknownMemberType]
    elif isinstance(stream, AsyncGenerator):
        await cast("AsyncGenerator[Any]", stream).aclose()

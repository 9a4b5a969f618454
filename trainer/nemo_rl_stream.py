"""The results of one call of NeMo RL, in the shape of a Ray streaming generator: `async for` gives awaitables of one
item each.

However it is left (a cancelled `anext`, `aclose`, the last reference gone, a failure), its batch is cancelled.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Awaitable, Generator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias, cast

from ..broker.errors import BatchCancelledError, ClosedError, GroupFailedError, UnreadableResultError
from ..collector import GroupFailure
from ..collector.timing import DEFAULT_PREFIX
from .batch import Batch
from .forks import forks

Item: TypeAlias = tuple[int, dict[str, Any], dict[str, float] | None]


class RolloutInfraError(GroupFailedError, ConnectionError):
    """A group failed for good for a reason outside of its data: timeouts, lost connections, dead workers, HTTP 5xx."""


class CallBatch(Batch[Any]):
    """A batch that can be left without waiting, and waited for beside others."""

    async def ready(self) -> None:
        """Return when the next item, or the end, is there to be asked for. Acknowledges the items before."""
        self._acknowledge()
        if not self._over:
            await self._session.outbox.ready()

    def abandon(self) -> None:
        """Cancel from wherever this is, a finalizer too; safe after the end."""
        self._over, self._outcome = (
            True,
            self._outcome or BatchCancelledError(f"batch {self.id} was left by its consumer"),
        )
        self._cancel_when_lost()


class Part(NamedTuple):
    """One batch of a call, and the caller's `_rowidx` of each of its rows."""

    batch: CallBatch
    indices: list[int]


class Feed:
    """What is to come of one call. A call is one batch, and a second one where single rows run beside whole groups."""

    def __init__(self, parts: list[Part], timer_prefix: str) -> None:
        self._parts = parts
        self._prefix = timer_prefix
        self._left = sum(len(part.indices) for part in parts)
        self._metrics: dict[str, float] = {}

    async def next(self) -> Item:
        """The next row; the last one carries the metrics of the whole call. Raises `StopAsyncIteration` after it."""
        while self._parts:
            part = await self._next_part()
            try:
                item = await anext(part.batch)
            except StopAsyncIteration:
                self._end_part(part)
                continue
            except UnreadableResultError as error:
                raise error.of_row(part.indices[error.row_index]) from None
            if isinstance(item, GroupFailure):
                raise _failure(item, part.indices)
            at, result = cast("tuple[int, dict[str, Any]]", item)
            self._left -= 1
            if self._left:
                return part.indices[at], with_writable_arrays(result), None
            await self._run_out()
            return part.indices[at], with_writable_arrays(result), self._metrics
        raise StopAsyncIteration

    async def cancel(self) -> None:
        """Cancel what is out; safe after the end."""
        parts, self._parts = self._parts, []
        await asyncio.gather(*(part.batch.cancel() for part in parts), return_exceptions=True)

    def abandon(self) -> None:
        """As `cancel`, without waiting for the broker."""
        for part in self._parts:
            part.batch.abandon()

    async def _next_part(self) -> Part:
        """The one that has something, and of two that have it the one that has not had its turn."""
        # `cancel` may put another list in its place meanwhile.
        parts = self._parts
        if len(parts) > 1:
            waits = [asyncio.create_task(part.batch.ready()) for part in parts]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                turn = next(at for at, wait in enumerate(waits) if wait.done())
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            parts.append(parts.pop(turn))
        return parts[-1]

    async def _run_out(self) -> None:
        """Let the batches close: their books and metrics are complete only then."""
        for part in [*self._parts]:
            async for surplus in part.batch:
                raise AssertionError(f"a batch gave more than its rows: {surplus!r}")
            self._end_part(part)

    def _end_part(self, part: Part) -> None:
        self._parts.remove(part)
        for name, value in part.batch.metrics.items():
            own = f"{self._prefix}{name.removeprefix(DEFAULT_PREFIX)}"
            self._metrics[own] = max(value, self._metrics.get(own, value))


class Settled:
    """An awaitable that is there already: one item, or the error in its place."""

    def __init__(self, item: Item | None, error: BaseException | None = None) -> None:
        self._item = item
        self._error = error

    def __await__(self) -> Generator[Any, Any, Item]:
        if self._error is not None:
            raise self._error
        yield from ()
        return cast(Item, self._item)


class RolloutStream:
    """One call. `async for` gives an awaitable per row, in completion order; errors are raised by the awaitable, as
    Ray does.
    """

    def __init__(self, opening: Future[Feed]) -> None:
        self._opening = opening
        self._forks = forks()
        self._over = False
        self._leave = weakref.finalize(self, _abandon, opening)

    def __aiter__(self) -> RolloutStream:
        return self

    async def __anext__(self) -> Awaitable[Item]:
        if self._over:
            raise StopAsyncIteration
        try:
            self._require_own()
            feed = await asyncio.wrap_future(self._opening)
            return Settled(await feed.next())
        except StopAsyncIteration:
            self._over = True
            self._leave.detach()
            raise
        except asyncio.CancelledError:
            self._over = True
            self._leave()
            raise
        except Exception as error:
            await self.aclose()
            return Settled(None, error)

    @property
    def _inherited(self) -> bool:
        return self._forks != forks()

    def _require_own(self) -> None:
        """Raise in a forked process: nobody in it opens the batch, or gets its results."""
        if self._inherited:
            raise ClosedError(
                "these rollouts belong to the process that this one was forked from; begin others here with `remote`"
            )

    async def aclose(self) -> None:
        """Leave: what is still out is cancelled before this returns."""
        self._over = True
        if self._leave.detach() is None or self._inherited:
            return
        if not self._opening.cancel():
            try:
                feed = await asyncio.wrap_future(self._opening)
            except Exception:
                return
            await feed.cancel()


def _abandon(opening: Future[Feed]) -> None:
    """Cancel without an event loop: a finalizer has none, and a cancelled `anext` must not wait for the broker."""
    opening.cancel()
    opening.add_done_callback(_abandon_opened)


def _abandon_opened(opening: Future[Feed]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().abandon()


def _failure(failure: GroupFailure, indices: list[int]) -> GroupFailedError:
    rows = ", ".join(str(indices[at]) for at in failure.row_indices)
    message = f"the group of rows {rows} failed for good{failure.account}"
    error = RolloutInfraError(message) if failure.failure_class == "infra" else GroupFailedError(message)
    failure.explain(error)
    return error


def with_writable_arrays(value: Any) -> Any:
    """The value with a copy in place of every read-only array, in place where it can be: `torch` warns about
    read-only ones.
    """
    numpy: Any = sys.modules.get("numpy")
    return value if numpy is None else _writable(value, numpy.ndarray)


def _writable(value: Any, array: type[Any]) -> Any:
    if isinstance(value, array):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        for key, item in items.items():
            items[key] = _writable(item, array)
    # Token lists are long and hold numbers only; one look tells.
    elif isinstance(value, list) and value and isinstance(value[0], dict | list | array):
        listed = cast("list[Any]", value)
        listed[:] = [_writable(item, array) for item in listed]
    return cast(Any, value)

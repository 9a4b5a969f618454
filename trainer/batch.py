"""The caller's hold on a batch: an async iterator and context manager that cleans up however it is left."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

from ..broker.errors import ClosedError
from ..collector import CompletedGroup, GroupFailure
from .engine import Engine
from .session import BatchCounts, Delivered, Ended, Session

OnFailure = Literal["raise", "yield"]
Item = TypeVar("Item")


class Batch(Generic[Item]):
    """Items in completion order. Asking for the next one acknowledges the one before.

    Leaving the context, cancelling, an exception, or losing the last reference cancels what is still out. Raises `GroupFailedError`
    for a failed group unless `on_failure="yield"`, `BooksError` when the books do not balance, and what ended the client.
    """

    def __init__(self, engine: Engine, session: Session, on_failure: OnFailure, prefix: str) -> None:
        self._engine = engine
        self._session = session
        self._on_failure = on_failure
        self._prefix = prefix
        self._owed: int | None = None
        self._over = False
        self._cancel_when_lost = weakref.finalize(self, _cancel_soon, engine, session)

    @property
    def id(self) -> str:
        """The batch's id on the broker, for `resume`, `status` and `explain`."""
        return self._session.batch

    @property
    def metrics(self) -> dict[str, float]:
        """Timings in seconds and counters, by the names of the design; complete once the batch is over."""
        return self._session.metrics(self._prefix)

    @property
    def counts(self) -> BatchCounts:
        """How the groups ended, so far."""
        return self._session.counts()

    @property
    def waiting_for(self) -> str:
        """What publishing waits for right now, or an empty string."""
        return self._session.publication.waiting_for

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        self._acknowledge()
        if self._over:
            raise StopAsyncIteration
        parcel = await self._session.outbox.get()
        if isinstance(parcel, Delivered):
            return await self._open(parcel)
        await self._finish(parcel)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave the batch; what is still out is cancelled."""
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel what is still out and remove the batch's keys; safe at any time, and after the end."""
        self._acknowledge()
        await self._end(complete=False)

    def _acknowledge(self) -> None:
        if self._owed is not None:
            owed, self._owed = self._owed, None
            self._engine.post(_hand_over, self._engine, self._session.batch, owed)

    async def _open(self, parcel: Delivered) -> Item:
        self._owed = parcel.acknowledges
        if isinstance(parcel.value, GroupFailure) and self._on_failure == "raise":
            await self.cancel()
            raise parcel.value.error()
        return cast(Item, parcel.value)

    async def _finish(self, parcel: Ended) -> None:
        await self._end(complete=parcel.error is None)
        if parcel.error is not None:
            raise parcel.error

    async def _end(self, *, complete: bool) -> None:
        if self._over:
            return
        self._over = True
        self._cancel_when_lost.detach()
        work: Coroutine[Any, Any, None] = self._engine_close(complete)
        try:
            future = self._engine.call(work)
        except ClosedError:
            if complete:
                raise
            return
        # A cancelled consumer must not leave the batch half closed.
        await asyncio.shield(asyncio.wrap_future(future))

    def _engine_close(self, complete: bool) -> Coroutine[Any, Any, None]:
        return self._engine.sessions.close(self._session, complete=complete)


GroupBatch = Batch[CompletedGroup | GroupFailure]
RowBatch = Batch[Any]


def _hand_over(engine: Engine, batch: str, group: int) -> None:
    engine.collector.hand_over(batch, [group])


def _cancel_soon(engine: Engine, session: Session) -> None:
    def close() -> None:
        task = asyncio.get_running_loop().create_task(engine.sessions.close(session, complete=False))
        session.publishing = session.publishing or task

    engine.post(close)

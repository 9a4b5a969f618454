"""The caller's hold on a batch: an async iterator and context manager that cleans up however it is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

from ..broker.errors import BatchCancelledError, BatchError, BrokerUnavailableError, ClosedError, RolloutBusError
from ..collector import CompletedGroup, GroupFailure, PackedGroup, PackedRow
from .engine import Engine
from .session import BatchCounts, Delivered, Ended, Session

log = logging.getLogger("rolloutbus.trainer")

# Unpacking takes the event loop: after so much of it without a wait the loop's other tasks have their turn.
UNPACKED_AT_ONCE_S = 0.002

OnFailure = Literal["raise", "yield"]
Item = TypeVar("Item")


class Batch(Generic[Item]):
    """Items in completion order. Asking for the next one acknowledges those before; where several tasks iterate
    together, those that any of them was given.

    Leaving the context, cancelling, an exception, or losing the last reference cancels what is still out. Raises
    `GroupFailedError` for a failed group unless `on_failure="yield"`, `BooksError` when the books do not balance, and
    what ended the client.
    """

    def __init__(self, engine: Engine, session: Session, on_failure: OnFailure, prefix: str) -> None:
        self._engine = engine
        self._session = session
        self._on_failure = on_failure
        self._prefix = prefix
        self._owed: list[int] = []
        self._unpacked_s = 0.0
        self._over = False
        self._outcome: BaseException | None = None
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
        try:
            await self.cancel()
        except RolloutBusError as failed:
            if error is None:
                raise
            # What went wrong first is what the caller must see.
            log.warning("batch %s could not be cleaned up (%s); its keys expire", self.id, failed)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        self._engine.require_own()
        self._acknowledge()
        if self._over:
            raise self._outcome or StopAsyncIteration
        if self._unpacked_s >= UNPACKED_AT_ONCE_S:
            self._unpacked_s = 0.0
            await asyncio.sleep(0)
        parcel = await self._session.outbox.get()
        if isinstance(parcel, Delivered):
            try:
                return self._open(parcel)
            except BatchError as error:
                parcel = Ended(error)
        await self._finish(parcel)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave the batch; what is still out is cancelled."""
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel what is still out and remove the batch's keys; safe at any time, and after the end."""
        self._acknowledge()
        await self._end(BatchCancelledError(f"batch {self.id} was cancelled by this client"))

    def _acknowledge(self) -> None:
        if self._owed:
            owed, self._owed = self._owed, []
            self._engine.post(_hand_over, self._engine, self._session.batch, owed)

    def _open(self, parcel: Delivered) -> Item:
        outbox = self._session.outbox
        try:
            item = self._unpacked_item(parcel.value)
        except BatchError as error:
            # For all others too, and before any of them can be told that all went well.
            outbox.end(Ended(error), at_once=True)
            outbox.settle()
            raise
        except BaseException:
            # Interrupted, or out of memory: nobody has had it.
            outbox.put_back(parcel)
            raise
        if parcel.acknowledges is not None:
            self._owed.append(parcel.acknowledges)
        outbox.settle()
        return item

    def _unpacked_item(self, value: PackedGroup | PackedRow | GroupFailure) -> Item:
        if isinstance(value, GroupFailure):
            if self._on_failure == "raise":
                raise value.error()
            return cast(Item, value)
        started = time.monotonic()
        opened = value.opened()
        self._unpacked_s += time.monotonic() - started
        return cast(Item, opened)

    async def _finish(self, parcel: Ended) -> None:
        await self._end(parcel.error)
        # What ended the batch for another consumer a moment ago ends it for this one too.
        error = self._outcome or parcel.error
        if error is not None:
            raise error

    async def _end(self, outcome: BaseException | None) -> None:
        """End the batch on the broker, once; `outcome` is what asking for more raises from now on."""
        if self._over:
            return
        self._over, self._outcome = True, outcome
        complete = outcome is None
        self._cancel_when_lost.detach()
        try:
            closing = asyncio.wrap_future(self._engine.call(self._engine_close(complete)))
            # A cancelled consumer must not leave the batch half closed. Who leaves early waits for no broker that
            # is away: there the batch is closed when it is back, or expires.
            closing.add_done_callback(_pass_over)
            async with asyncio.timeout(None if complete else self._engine.patience_s()):
                await asyncio.shield(closing)
        except RolloutBusError as error:
            if complete:
                self._outcome = error
                raise
            if not isinstance(error, (ClosedError, BrokerUnavailableError)):
                raise
            # What ended the batch is told already, and what is left of it on the broker expires.
            log.warning("batch %s could not be closed on the broker (%s)", self.id, error)
        except TimeoutError:
            log.warning("batch %s: the broker does not answer; there the batch is cancelled later, or expires", self.id)

    def _engine_close(self, complete: bool) -> Coroutine[Any, Any, None]:
        return self._engine.sessions.close(self._session, complete=complete)


GroupBatch = Batch[CompletedGroup | GroupFailure]
RowBatch = Batch[Any]


def _pass_over(future: asyncio.Future[None]) -> None:
    """Nobody waits for its outcome any more."""
    if not future.cancelled():
        future.exception()


def _hand_over(engine: Engine, batch: str, groups: list[int]) -> None:
    engine.collector.hand_over(batch, groups)


def _cancel_soon(engine: Engine, session: Session) -> None:
    # Nobody is there to be told; the engine keeps the call until it is done.
    with contextlib.suppress(ClosedError, BrokerUnavailableError):
        engine.call(engine.sessions.close(session, complete=False))

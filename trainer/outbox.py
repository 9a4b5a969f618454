"""Items from the client's own thread to whoever consumes them: any event loop, any thread, one after another or side by
side.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """An unbounded queue; what bounds it is the broker, which stops handing out work while too much is unread."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._waiters: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Add an item; wakes one waiter."""
        with self._lock:
            self._items.append(item)
            waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_result(None)

    def _next_waiter(self) -> Future[None] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.set_running_or_notify_cancel():
                return waiter
        return None

    async def get(self) -> Item:
        """The next item; a cancelled wait takes nothing."""
        while (found := self._take()) is None:
            with self._lock:
                if self._items:
                    continue
                waiter: Future[None] = Future()
                self._waiters.append(waiter)
            try:
                await asyncio.wrap_future(waiter)
            except asyncio.CancelledError:
                self._pass_on(waiter)
                raise
        return found[0]

    def _take(self) -> tuple[Item] | None:
        with self._lock:
            return (self._items.popleft(),) if self._items else None

    def _pass_on(self, waiter: Future[None]) -> None:
        """A waiter that was woken and cancelled at once must not keep the wake-up to itself."""
        with self._lock:
            another = self._next_waiter() if self._items else None
        if another is not None:
            another.set_result(None)

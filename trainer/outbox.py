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
    """An unbounded queue; what bounds it is the broker, which stops handing out work while too much is unread.

    What `get` gave is in the taker's hand until `settle` or `put_back`. The first `end` is given to all who ask, once
    everything before it was given and nobody has anything in hand: until then something could still be put back.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._ends: deque[Item] = deque()
        self._in_hand = 0
        self._waiters: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def ending(self) -> Item | None:
        """What all are given at the end, None while that is not known."""
        with self._lock:
            return self._ends[0] if self._ends else None

    def put(self, item: Item) -> None:
        """Add an item; wakes one waiter."""
        with self._lock:
            self._items.append(item)
            waiter = self._next_waiter()
        _wake(waiter)

    def end(self, item: Item, *, at_once: bool = False) -> None:
        """What all are given after the last item; with `at_once` in place of an end that was said before."""
        with self._lock:
            if at_once:
                self._ends.clear()
            self._ends.append(item)
            waiter = self._waiter_if_any_item()
        _wake(waiter)

    def settle(self) -> None:
        """An item that was taken is done with."""
        with self._lock:
            self._in_hand -= 1
            waiter = self._waiter_if_any_item()
        _wake(waiter)

    def put_back(self, item: Item) -> None:
        """An item that was taken is to be had again, before all others."""
        with self._lock:
            self._in_hand -= 1
            self._items.appendleft(item)
            waiter = self._next_waiter()
        _wake(waiter)

    async def get(self) -> Item:
        """The next item, or the end; a cancelled wait takes nothing."""
        while (found := self._take()) is None:
            await self.ready()
        return found[0]

    async def ready(self) -> None:
        """Return when `get` has something to give, unless somebody else is quicker. Whoever was told so asks for it:
        nobody else is woken.
        """
        with self._lock:
            if self._has_any():
                return
            waiter: Future[None] = Future()
            self._waiters.append(waiter)
        try:
            await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            self._pass_on(waiter)
            raise

    def _take(self) -> tuple[Item] | None:
        with self._lock:
            if self._items:
                self._in_hand += 1
                return (self._items.popleft(),)
            if not self._has_any():
                return None
            end, waiter = self._ends[0], self._next_waiter()
        # It stays for all others.
        _wake(waiter)
        return (end,)

    def _has_any(self) -> bool:
        return bool(self._items) or (bool(self._ends) and not self._in_hand)

    def _waiter_if_any_item(self) -> Future[None] | None:
        return self._next_waiter() if self._has_any() else None

    def _next_waiter(self) -> Future[None] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.set_running_or_notify_cancel():
                return waiter
        return None

    def _pass_on(self, waiter: Future[None]) -> None:
        """A waiter that was woken and cancelled at once must not keep the wake-up to itself."""
        with self._lock:
            another = self._waiter_if_any_item()
        _wake(another)


def _wake(waiter: Future[None] | None) -> None:
    if waiter is not None:
        waiter.set_result(None)

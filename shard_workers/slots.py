"""How many groups an instance runs at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`total` places, taken and given back in one event loop; a place that comes free wakes all who wait, in order."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def used(self) -> int:
        return self.total - self.free

    def occupy_now(self) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if self.free <= 0:
            return False
        self.free -= 1
        return True

    async def occupy(self) -> None:
        """Take a place, waiting for one."""
        while not self.occupy_now():
            await self.any_free()

    async def any_free(self) -> None:
        """Return when a place is free; it is not taken yet."""
        while self.free <= 0:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def release(self) -> None:
        """Give a place back."""
        self.free += 1
        # All of them look again, in order: one that only wanted to know, or was cancelled, would keep the word to
        # itself.
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

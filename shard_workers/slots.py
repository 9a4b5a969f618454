"""How many groups an instance runs at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator


class Slots:
    """`total` places, taken and given back in one event loop; a place that comes free wakes all who wait, in order."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._ahead = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def used(self) -> int:
        return self.total - self.free

    def occupy_now(self) -> bool:
        """Take a place if one is free."""
        if self.free <= 0:
            return False
        self.free -= 1
        return True

    async def occupy(self) -> None:
        """Take a place, waiting for one."""
        while not self.occupy_now():
            await self._change()

    async def any_free(self) -> None:
        """Return when a place is free and nobody goes ahead; it is not taken yet."""
        while self.free <= 0 or self._ahead:
            await self._change()

    @contextlib.asynccontextmanager
    async def ahead(self) -> AsyncGenerator[None]:
        """Go on when a place is free; until this is left, nobody is told by `any_free` that there is one."""
        self._ahead += 1
        try:
            while self.free <= 0:
                await self._change()
            yield
        finally:
            self._ahead -= 1
            self._wake()

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def release(self) -> None:
        """Give a place back."""
        self.free += 1
        self._wake()

    def _wake(self) -> None:
        # All of them look again, in order: one that only wanted to know, or was cancelled, would keep the word to
        # itself.
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

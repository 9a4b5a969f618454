"""A broker that is away: a pause with jitter between tries, and a word now and then for whoever reads the log."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.backoff import ExponentialWithJitterBackoff

# It keeps nothing between calls.
_BACKOFF = ExponentialWithJitterBackoff(cap=1.0, base=0.02)
# From here on a pause grows no more, and the power would only become a huge number.
_MOST_DOUBLINGS = 12
_SAID_FIRST = (1, 10)
_SAID_EVERY = 60


class Outage:
    """Tries in a row that failed, of `who`; they began at `since` (monotonic seconds), or with the first failure."""

    def __init__(self, log: logging.Logger, who: str, since: float | None = None) -> None:
        self._log = log
        self._who = who
        self._since = since
        self._failures = 0

    def over(self) -> None:
        """A try succeeded."""
        self._failures, self._since = 0, None

    async def pause(self, error: Exception) -> None:
        """A try failed: wait before the next one."""
        self._failures += 1
        if self._since is None:
            self._since = time.monotonic()
        if self._failures in _SAID_FIRST or self._failures % _SAID_EVERY == 0:
            lasted_s = time.monotonic() - self._since
            self._log.warning("%s: waiting for the broker since %.1f s (%s)", self._who, lasted_s, error)
        await asyncio.sleep(_BACKOFF.compute(min(self._failures, _MOST_DOUBLINGS)))

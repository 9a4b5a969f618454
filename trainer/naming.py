"""Waiting for a client's name: one live process has it, and one that ended without a word leaves it taken for the rest
of its lease.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ..broker.errors import ClientNameTakenError

log = logging.getLogger("rolloutbus.trainer")

# Who is alive shows it sooner; from here on a person who looks at a program that does nothing must be told why.
SAY_AFTER_S = 1.0
_POLL_S = 0.2


class NameWait:
    """One wait of at most `wait_s`; with `only_for_the_dead` it ends as soon as the holder shows that it lives."""

    def __init__(self, client: str, run: str, wait_s: float, *, only_for_the_dead: bool) -> None:
        self._client = client
        self._run = run
        self._only_for_the_dead = only_for_the_dead
        self._began = time.monotonic()
        self._deadline = self._began + wait_s
        self._left_before = float("inf")
        self._said = False

    async def pause(self, left_ms: int) -> None:
        """Wait a moment for a name whose lease has `left_ms` left; raises `ClientNameTakenError` when it is enough."""
        # A lease that grows is being renewed: somebody is alive under this name.
        alive = left_ms > self._left_before
        if time.monotonic() >= self._deadline or (alive and self._only_for_the_dead):
            raise ClientNameTakenError(
                f"client {self._client!r} of run {self._run!r} belongs to another live process (its lease "
                f"ends in {left_ms / 1000:.0f} s unless renewed); end that process, or give this one another name"
            )
        self._left_before = left_ms
        self._say(left_ms)
        await asyncio.sleep(min(_POLL_S, left_ms / 1000))

    def _say(self, left_ms: int) -> None:
        if self._said or time.monotonic() - self._began < SAY_AFTER_S:
            return
        self._said = True
        most = self._deadline - time.monotonic()
        log.warning(
            "client %s of run %s: its name is still taken by another process, which has probably ended without "
            "closing its client; waiting for its lease to end, %.0f s at most",
            self._client, self._run, min(most, left_ms / 1000) if self._only_for_the_dead else most,
        )  # fmt: skip

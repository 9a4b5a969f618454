"""How far a job is, per shard: bars on a terminal, plain lines at intervals elsewhere. Always on standard error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from .console import err, say

LINE_EVERY_S = 5.0


class ShardProgress:
    """An async context manager; `totals` are groups per shard, `waiting_for` says what publishing waits for, or
    nothing.
    """

    def __init__(
        self, totals: Mapping[str, int], waiting_for: Callable[[], str], *, every_s: float = LINE_EVERY_S
    ) -> None:
        self._totals = totals
        self._done = dict.fromkeys(totals, 0)
        self._failed = dict.fromkeys(totals, 0)
        self._waiting_for = waiting_for
        self._every_s = every_s
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if err.is_terminal:
            self._begin_bars()
        else:
            self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            say(self.line())

    def advance(self, shard: str, *, failed: bool) -> None:
        """One group of the shard has ended."""
        self._done[shard] += 1
        self._failed[shard] += failed
        if self._bars is not None:
            failures = f"{self._failed[shard]} failed" if self._failed[shard] else ""
            self._bars.update(self._tasks[shard], advance=1, failures=failures)

    def line(self) -> str:
        """All shards in one line."""
        shards = ", ".join(
            f"{shard} {self._done[shard]}/{total}" + (f" ({self._failed[shard]} failed)" if self._failed[shard] else "")
            for shard, total in self._totals.items()
        )
        waiting = self._waiting_for()
        return f"groups: {shards}" + (f"; publishing waits: {waiting}" if waiting else "")

    def _begin_bars(self) -> None:
        columns = (
            SpinnerColumn(finished_text=" "), TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
            MofNCompleteColumn(), TextColumn("groups"), TimeElapsedColumn(),
            TextColumn("{task.fields[failures]}", style="red"),
        )  # fmt: skip
        self._bars = Progress(*columns, console=err, expand=True)
        self._tasks = {
            shard: self._bars.add_task(shard, total=total, failures="") for shard, total in self._totals.items()
        }
        self._bars.start()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            say(self.line())

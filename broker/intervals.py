"""Wall time covered by intervals that overlap: how long something was going on, not how often."""

from __future__ import annotations

import bisect


class IntervalUnion:
    """Total length covered by intervals that may overlap and come in any order."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self.total = 0.0

    def add(self, start: float, end: float) -> None:
        """Cover [start, end]; an empty or reversed interval covers nothing."""
        if end <= start:
            return
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
            covered = sum(self._ends[at] - self._starts[at] for at in range(first, last))
            self.total -= covered
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self.total += end - start

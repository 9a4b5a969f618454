"""Where the time of an instance goes, per batch: unions of intervals in wall time, because groups overlap."""

from __future__ import annotations

import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Generator

from ..broker.intervals import IntervalUnion

# Timings of batches that ended long ago are dropped; a worker is not told when a batch closes.
_BATCHES_KEPT = 1024
# Made once: json.dumps makes one per call where it is given separators.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class _Busy:
    """How long something was going on, whatever number of times at once; the clock only goes forward."""

    __slots__ = ("_running", "_since", "_total")

    def __init__(self) -> None:
        self._running = 0
        self._since = self._total = 0.0

    def begin(self, now: float) -> None:
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float) -> None:
        self._running -= 1
        if not self._running:
            self._total += now - self._since

    def total(self, now: float) -> float:
        return self._total + (now - self._since if self._running else 0.0)


class BatchTiming:
    """One instance's times in a batch. Names: queue_wait, environment, publish, await_results, postprocess_results."""

    def __init__(self) -> None:
        self._busy: dict[str, _Busy] = {}
        self._spans: dict[str, IntervalUnion] = {}
        self._spent: dict[str, float] = {}
        self._groups = 0

    @contextlib.contextmanager
    def going_on(self, name: str) -> Generator[None]:
        """Time that several groups share where they overlap."""
        busy = self._busy.setdefault(name, _Busy())
        busy.begin(time.monotonic())
        try:
            yield
        finally:
            busy.end(time.monotonic())

    def add(self, name: str, start: float, end: float) -> None:
        """As `going_on`, for what is known only when it is over."""
        self._spans.setdefault(name, IntervalUnion()).add(start, end)

    def spend(self, name: str, seconds: float) -> None:
        """Time that cannot overlap with itself, because it is spent in the event loop."""
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def count_group(self) -> None:
        self._groups += 1

    def totals(self) -> dict[str, float]:
        """Seconds by name up to now, and how many groups."""
        now = time.monotonic()
        return {
            **self._spent,
            **{name: span.total for name, span in self._spans.items()},
            **{name: busy.total(now) for name, busy in self._busy.items()},
            "groups": self._groups,
        }


class InstanceTiming:
    """All batches of one instance; `packed` is what travels with a finishing group."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._batches: OrderedDict[str, BatchTiming] = OrderedDict()

    def of(self, batch: str) -> BatchTiming:
        timing = self._batches.get(batch)
        if timing is None:
            timing = self._batches[batch] = BatchTiming()
            if len(self._batches) > _BATCHES_KEPT:
                self._batches.popitem(last=False)
        return timing

    def packed(self, batch: str) -> str:
        totals = {name: round(value, 6) for name, value in self.of(batch).totals().items()}
        return _to_json({"incarnation": self._incarnation, **totals})

"""Where the time of an instance goes, per batch: unions of intervals in wall time, because groups overlap."""

from __future__ import annotations

import json
from collections import OrderedDict

from ..broker.intervals import IntervalUnion

# Timings of batches that ended long ago are dropped; a worker is not told when a batch closes.
_BATCHES_KEPT = 1024
# Made once: json.dumps makes one per call where it is given separators.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class BatchTiming:
    """One instance's times in a batch. Names: queue_wait, environment, publish, await_results, postprocess_results."""

    def __init__(self) -> None:
        self._spans: dict[str, IntervalUnion] = {}
        self._spent: dict[str, float] = {}
        self._extra: dict[str, float] = {}
        self._groups = 0

    def add(self, name: str, start: float, end: float) -> None:
        self._spans.setdefault(name, IntervalUnion()).add(start, end)

    def spend(self, name: str, seconds: float) -> None:
        """Time that cannot overlap with itself, because it is spent in the event loop."""
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def count_group(self) -> None:
        self._groups += 1

    def report(self, name: str, value: float) -> None:
        """A number of the environment's own, already rolled up there."""
        self._extra[name] = value

    def totals(self) -> dict[str, float]:
        return {
            **self._extra,
            **self._spent,
            **{name: span.total for name, span in self._spans.items()},
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

"""What is computed from measurements; plain values in and out."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.contest import Measurement


@dataclass(frozen=True)
class Ratio:
    """Rows per second as a multiple of the base's median: median, slowest and fastest repeat."""

    median: float
    least: float
    most: float


def rate(measurements: Iterable[Measurement]) -> float:
    """Median rows per second."""
    return statistics.median(measurement.rows_per_s for measurement in measurements)


def ratio(measurements: Sequence[Measurement], base: Sequence[Measurement]) -> Ratio:
    unit, rates = rate(base), [measurement.rows_per_s for measurement in measurements]
    return Ratio(rate(measurements) / unit, min(rates) / unit, max(rates) / unit)


def first_ms(measurements: Iterable[Measurement]) -> float:
    return statistics.median(measurement.first_ms for measurement in measurements)


def cpu_s_per_1000_rows(measurements: Sequence[Measurement], role: str, rows: int) -> float:
    """Over all repeats together: one repeat may be only a few of the system's clock ticks."""
    return sum(measurement.cpu_s.get(role, 0.0) for measurement in measurements) / (rows * len(measurements)) * 1000


def peak_mb(measurements: Iterable[Measurement], role: str) -> float:
    return statistics.median(measurement.peak_mb.get(role, 0.0) for measurement in measurements)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` (0 to 1) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The power of the size by which time grows: least squares in logarithms. 1 is linear."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(time) for time in times]).slope


def lower_bound(durations: Sequence[float], slots: int) -> float:
    """No schedule ends sooner: neither before the longest nor before all slots together have done the work."""
    return max(max(durations), sum(durations) / slots)


def in_order(durations: Sequence[float], slots: int) -> float:
    """How long it takes when each in turn goes to the slot that is free first, at no cost."""
    free_at = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free_at, free_at[0] + duration)
    return max(free_at)

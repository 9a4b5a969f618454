"""What a row costs with more workers, and with more rows in one batch.

Each repeat of each point has a server, workers and a trainer of its own, and a warm-up in which every worker gets as
much as the only one of the smallest arrangement; figures are the median of three repeats, between which all other
points have had their turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import TypeVar

from benchmarks.contest import Contestant, Measurement, Order
from benchmarks.payloads import KINDS
from benchmarks.results import GrowthPoint, InstancesPoint

Point = TypeVar("Point")
# (shards, replicas of each)
INSTANCES = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 2), (1, 4), (1, 8)]
BATCH_ROWS = [1_000, 3_000, 10_000, 30_000, 100_000]
REPEATS = 3
WARM_UP_ROWS = 1_000
# Goals: cost per row beside the cheapest arrangement's, and the exponent of time over rows.
COST_GOAL = 1.3
EXPONENT_GOAL = 1.05


def instances(scale: float) -> list[InstancesPoint]:
    """The same work for every arrangement of workers."""
    rows = max(1_024, int(KINDS["1.5 KB"][1] * scale) // 128 * 128)
    found = _in_turns(INSTANCES, lambda arrangement: _with_instances(*arrangement, rows))
    return [_instances_point(arrangement, rows, measured) for arrangement, measured in found.items()]


def _with_instances(shards: int, replicas: int, rows: int) -> Measurement:
    order = Order("1.5 KB", rows, shards=shards)
    with Contestant(f"{shards} shards x {replicas} replicas", "product", "unix", str(shards), str(replicas)) as player:
        # An interpreter is slow until it has run what it runs: with one warm-up for all, sixteen would have run a
        # sixteenth of what one has.
        for _ in range(shards * replicas):
            player.run(order)
        return player.run(order)


def _instances_point(arrangement: tuple[int, int], rows: int, found: list[Measurement]) -> InstancesPoint:
    shards, replicas = arrangement
    wall_us = statistics.median(1e6 / measurement.rows_per_s for measurement in found)
    cpu_us = statistics.median(sum(measurement.cpu_s.values()) / rows * 1e6 for measurement in found)
    return InstancesPoint(shards=shards, replicas=replicas, wall_us=wall_us, cpu_us=cpu_us)


def growth(scale: float) -> list[GrowthPoint]:
    """One batch of more and more small rows."""
    found = _in_turns([max(64, int(rows * scale) // 8 * 8) for rows in BATCH_ROWS], _with_rows)
    return [_growth_point(rows, measured) for rows, measured in found.items()]


def _with_rows(rows: int) -> Measurement:
    with Contestant(f"a batch of {rows:,} rows", "product", "unix", "1", "1") as player:
        player.run(Order("tiny", WARM_UP_ROWS, shards=1))
        return player.run(Order("tiny", rows, shards=1))


def _growth_point(rows: int, found: list[Measurement]) -> GrowthPoint:
    return GrowthPoint(
        rows=rows,
        seconds=statistics.median(rows / measurement.rows_per_s for measurement in found),
        held_mb=statistics.median(measurement.before_mb["trainer"] for measurement in found),
        growth_mb=statistics.median(measurement.growth_mb("trainer") for measurement in found),
    )


def _in_turns(points: Iterable[Point], measure: Callable[[Point], Measurement]) -> dict[Point, list[Measurement]]:
    """Every point once, then all of them again, so that a noisy minute does not meet one point only."""
    found: dict[Point, list[Measurement]] = {point: [] for point in points}
    for _ in range(REPEATS):
        for point, measurements in found.items():
            measurements.append(measure(point))
    return found

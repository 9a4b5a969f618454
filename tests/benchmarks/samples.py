"""Results as a run would leave them, with round figures."""

from __future__ import annotations

from benchmarks.contest import Measurement
from benchmarks.results import (
    Compared,
    CrowdPoint,
    GrowthPoint,
    HeldPoint,
    InstancesPoint,
    Machine,
    MakespanPoint,
    Results,
)

MACHINE = Machine(
    cpu="A CPU", cores=2, system="Linux x86_64", python="3.13.0", server="Redis 7.0.15", ray="2.60.0", peak_is_true=True
)


def measured(*rates: float, first_ms: float = 10.0) -> list[Measurement]:
    cost = {"broker": 0.1, "workers": 0.2, "trainer": 0.3}
    peak = {"broker": 20.0, "workers": 60.0, "trainer": 70.0}
    return [Measurement(rate, first_ms, cpu_s=cost, peak_mb=peak) for rate in rates]


def compared(ray: float = 1_000.0, unix: float = 10_000.0) -> Compared:
    batches = {"ray": measured(ray, ray, ray), "unix": measured(unix * 0.9, unix, unix * 1.2)}
    return Compared(rows=1_000, batches=batches, by_row={"unix": measured(unix, first_ms=4.0)})


def crowd_point(batches: int) -> CrowdPoint:
    return CrowdPoint(
        batches=batches, batches_per_s=900.0, p50_ms=1.0, p99_ms=2.0, connections=6, tasks=6, threads=2, files=20,
        keys_before=7, keys_open=7 + 2 * batches, keys_after=7,
    )  # fmt: skip


def full() -> Results:
    return Results(
        machine=MACHINE,
        compared={"1.5 KB": compared(), "shared 2 MB prompt": compared(unix=12_345.0)},
        low_load_ms={"unix": [1.0] * 99 + [9.0]},
        instances=[InstancesPoint(shards=at, replicas=1, wall_us=40.0 + at, cpu_us=70.0) for at in (1, 16)],
        crowd=[crowd_point(1), crowd_point(1_000)],
        growth=[GrowthPoint(rows=rows, seconds=rows / 1e4, held_mb=60.0, growth_mb=0.5) for rows in (1_000, 100_000)],
        held=[HeldPoint(kind="1.5 KB", outstanding_mb=64.0, per_byte=1.07)],
        makespan=[
            MakespanPoint(slots=2, seed=seed, bound_s=2.0, in_order_s=2.2, pull_s=pull, static_s=3.0)
            for seed, pull in ((1, 2.4), (2, 2.8))
        ],
    )

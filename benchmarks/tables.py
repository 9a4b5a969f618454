"""The figures as tables: titles, columns and cells as text, for whoever renders them. Empty results give no table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.compare import GOALS
from benchmarks.contest import Measurement
from benchmarks.figures import cpu_s_per_1000_rows, exponent, first_ms, peak_mb, percentile, rate, ratio
from benchmarks.held import MEMORY_GOAL
from benchmarks.makespan import GROUPS, MEDIAN_S, REPLICAS, SLOTS, STRAGGLER_S, STRAGGLERS
from benchmarks.results import Compared, MakespanPoint, Results
from benchmarks.scaling import COST_GOAL, EXPONENT_GOAL

ROLES = ("broker", "workers", "trainer")


@dataclass(frozen=True)
class Table:
    """One table; the note says what its cells are."""

    title: str
    columns: list[str]
    lines: list[list[str]]
    note: str


def tables(results: Results) -> list[Table]:
    """All that there are figures for."""
    return [
        *(_compared_tables(results.compared, peak_is_true=results.machine.peak_is_true) if results.compared else []),
        *([_low_load(results.low_load_ms)] if results.low_load_ms else []),
        *([_instances(results)] if results.instances else []),
        *([_crowd(results)] if results.crowd else []),
        *([_growth(results)] if results.growth else []),
        *([_held(results)] if results.held else []),
        *([_makespan(results)] if results.makespan else []),
    ]


def _compared_tables(compared: Mapping[str, Compared], *, peak_is_true: bool) -> list[Table]:
    names = list(dict.fromkeys(name for kind in compared.values() for name in kind.batches))
    return [_rates(compared, names), _first_rows(compared, names), _costs(compared, peak_is_true=peak_is_true)]


def _rates(compared: Mapping[str, Compared], names: list[str]) -> Table:
    repeats = sorted({len(found) for kind in compared.values() for found in kind.batches.values()})
    lines = [
        [kind, *(_rate_cell(found.batches, name) for name in names), _goal_cell(kind)]
        for kind, found in compared.items()
    ]
    return Table(
        "Rows per second, in multiples of Ray's",
        ["rows of", *names, "goal"],
        lines,
        f"Median (least–most) of {' or '.join(map(str, repeats))} repeats in turns; Ray in rows per second. "
        "bare and thin: Redis Streams without any guarantee, with redis-py and with our own codec and writer; "
        "aof: append-only file, flushed each second.",
    )


def _rate_cell(batches: Mapping[str, list[Measurement]], name: str) -> str:
    if name not in batches:
        return "–"
    if name == "ray" or "ray" not in batches:
        return f"{rate(batches[name]):,.0f}/s"
    found = ratio(batches[name], batches["ray"])
    return f"{found.median:.1f} × ({found.least:.1f}–{found.most:.1f})"


def _goal_cell(kind: str) -> str:
    goals = [f"{goal:g} ×" if name == "unix" else f"{name} {goal:g} ×" for name, goal in GOALS.get(kind, {}).items()]
    return ", ".join(goals) or "–"


def _first_rows(compared: Mapping[str, Compared], names: list[str]) -> Table:
    return Table(
        "Milliseconds to the first row",
        ["rows of", *names],
        [[kind, *(_first_cell(found, name) for name in names)] for kind, found in compared.items()],
        "The product through its row API, in repeats of their own, and in brackets to its first whole group.",
    )


def _first_cell(found: Compared, name: str) -> str:
    if name not in found.batches:
        return "–"
    in_batch = f"{first_ms(found.batches[name]):.0f}"
    return f"{first_ms(found.by_row[name]):.0f} ({in_batch})" if name in found.by_row else in_batch


def _costs(compared: Mapping[str, Compared], *, peak_is_true: bool) -> Table:
    lines = [
        [kind if at == 0 else "", name, *_cost_cells(measured, found.rows)]
        for kind, found in compared.items()
        for at, (name, measured) in enumerate(found.batches.items())
    ]
    peak = "Peaks are" if peak_is_true else "This system has no peak to read, so memory is what is resident at the end:"
    return Table(
        "CPU seconds per 1,000 rows, and peak memory in MB",
        ["rows of", "by", *(f"{role} s" for role in ROLES), *(f"{role} MB" for role in ROLES)],
        lines,
        "CPU over all processes of a role; Ray's broker is its raylet and its global control store. "
        f"{peak} medians over the repeats, of a role's largest process; the trainer holds the rows too.",
    )


def _cost_cells(measured: list[Measurement], rows: int) -> list[str]:
    seconds = [f"{cpu_s_per_1000_rows(measured, role, rows):.3f}" for role in ROLES]
    return seconds + [f"{peak_mb(measured, role):.0f}" for role in ROLES]


def _low_load(overheads: Mapping[str, list[float]]) -> Table:
    return Table(
        "Overhead per row at 200 rows/s, in milliseconds",
        ["by", "p50", "p99"],
        [[name, f"{percentile(ms, 0.5):.2f}", f"{percentile(ms, 0.99):.2f}"] for name, ms in overheads.items()],
        "From the moment a row is done in the worker to the moment the trainer has it; every row is a batch.",
    )


def _instances(results: Results) -> Table:
    lines = [
        [
            f"{point.shards}",
            f"{point.replicas}",
            f"{point.wall_us:.1f}",
            f"{point.wall_us / results.best_wall_us:.2f} ×",
            f"{point.cpu_us:.1f}",
            f"{point.cpu_us / results.best_cpu_us:.2f} ×",
        ]
        for point in results.instances
    ]
    return Table(
        "Cost of a 1.5 KB row by shards and replicas, in microseconds",
        ["shards", "replicas", "wall µs", "of best", "CPU µs", "of best"],
        lines,
        f"The same work for each; a worker process per replica on {results.machine.cores} cores, CPU of all processes "
        f"together. Goal: within {COST_GOAL:g} × of the best.",
    )


def _crowd(results: Results) -> Table:
    lines = [
        [
            f"{point.batches:,}",
            f"{point.batches_per_s:,.0f}",
            f"{point.p50_ms:.1f}",
            f"{point.p99_ms:.1f}",
            *(f"{count:,}" for count in (point.connections, point.tasks, point.threads, point.files)),
            f"{point.keys_before:,} / {point.keys_open:,} / {point.keys_after:,}",
        ]
        for point in results.crowd
    ]
    return Table(
        "One-group batches at once, through one client",
        ["at once", "per s", "p50 ms", "p99 ms", "conn.", "tasks", "threads", "files", "keys"],
        lines,
        "Counts while all are open: connections at the broker (client and worker), asyncio tasks in the client's "
        "thread, threads and files of the trainer's process; keys on the broker before, while, and after.",
    )


def _growth(results: Results) -> Table:
    lines = [
        [
            f"{point.rows:,}",
            f"{point.seconds:.3f}",
            f"{point.us_per_row:.1f}",
            f"{point.held_mb:.0f}",
            f"+ {point.growth_mb:.1f}",
        ]
        for point in results.growth
    ]
    power = exponent([point.rows for point in results.growth], [point.seconds for point in results.growth])
    return Table(
        "One batch of more and more small rows",
        ["rows", "seconds", "µs per row", "trainer MB", "and at most"],
        lines,
        f"Time grows as rows to the power of {power:.2f} (goal: at most {EXPONENT_GOAL:g}). Memory is what the "
        "trainer held with the rows built, and its peak beyond that; results are dropped as they come.",
    )


def _held(results: Results) -> Table:
    return Table(
        "Broker memory for results that wait for the trainer",
        ["rows of", "waiting MB", "memory per byte"],
        [[point.kind, f"{point.outstanding_mb:.0f}", f"{point.per_byte:.2f}"] for point in results.held],
        f"What the server uses when all of a batch's results wait there, less what it used before (goal: at most "
        f"{MEMORY_GOAL:g}).",
    )


def _makespan(results: Results) -> Table:
    by_slots = [[point for point in results.makespan if point.slots == slots] for slots in SLOTS]
    return Table(
        "Makespan of long-tailed rollouts, in multiples of the lower bound",
        ["slots", "durations", "bound s", "in order", "pull", "static"],
        [line for points in by_slots if points for line in _makespan_lines(points)],
        f"{GROUPS} groups, lognormal with {STRAGGLERS:.0%} stragglers of {STRAGGLER_S / MEDIAN_S:.0f} times the "
        f"median, {REPLICAS} replicas. The bound is the longest group or all work over all slots, whichever is more. "
        "In order: computed, one queue for all slots at no cost, durations unknown. Pull: one shard of all replicas. "
        "Static: the groups dealt to the replicas in turn.",
    )


def _makespan_lines(points: list[MakespanPoint]) -> list[list[str]]:
    """One line per seed and the mean of all."""
    multiples = [
        [span / point.bound_s for span in (point.in_order_s, point.pull_s, point.static_s)] for point in points
    ]
    slots = f"{points[0].slots}"
    lines = [
        [slots, f"seed {point.seed}", f"{point.bound_s:.2f}", *(f"{multiple:.2f} ×" for multiple in line)]
        for point, line in zip(points, multiples, strict=True)
    ]
    means = [statistics.mean(column) for column in zip(*multiples, strict=True)]
    return [*lines, [slots, "mean", "", *(f"{mean:.2f} ×" for mean in means)]]

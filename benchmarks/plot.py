"""The figures as one picture: the comparison, the scaling curves, the makespan. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare import GOALS
from benchmarks.contest import BenchmarkError
from benchmarks.figures import Ratio, exponent, ratio
from benchmarks.results import Compared, InstancesPoint, Results
from benchmarks.scaling import COST_GOAL

COLORS = {"bare": "#9aa5b1", "unix": "#1f6feb", "tcp": "#6ea8fe", "aof": "#0b3d91"}
LABELS = {
    "bare": "bare Redis, no guarantees",
    "unix": "rolloutbus, unix socket",
    "tcp": "rolloutbus, TCP",
    "aof": "rolloutbus, append-only file",
}
PULL, STATIC, IN_ORDER, GOAL = "#1f6feb", "#9aa5b1", "#d0d7de", "#d1242f"
ARRANGEMENTS = {"in_order_s": "one queue, computed", "pull_s": "pull", "static_s": "static round-robin"}
BAR_WIDTH = 0.19


def require() -> Any:
    """matplotlib, set up to draw into files. Raises `BenchmarkError` where it is not installed."""
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise BenchmarkError(f"{error.name} is not installed; pip install 'rolloutbus[bench]'") from None


def draw(results: Results, path: Path) -> None:
    """All that there are figures for, each in its panel."""
    pyplot = require()
    panels = _panels(results)
    figure = pyplot.figure(figsize=(12, 9), layout="constrained")
    grid = figure.add_gridspec(2, 6)
    places = [grid[0, :], grid[1, 0:2], grid[1, 2:4], grid[1, 4:6]]
    for (panel, ready), place in zip(panels, places, strict=True):
        axes = figure.add_subplot(place)
        axes.spines[["top", "right"]].set_visible(False)
        if ready:
            panel(axes, results)
        else:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "not measured yet", ha="center", va="center", transform=axes.transAxes)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panels(results: Results) -> list[tuple[Callable[[Any, Results], None], bool]]:
    return [
        (_compared, any("ray" in found.batches for found in results.compared.values())),
        (_instances, bool(results.instances)),
        (_growth, bool(results.growth)),
        (_makespan, bool(results.makespan)),
    ]


def _compared(axes: Any, results: Results) -> None:
    kinds = [kind for kind, found in results.compared.items() if "ray" in found.batches]
    for at, kind in enumerate(kinds):
        _bars_of(axes, at, kind, results.compared[kind])
    axes.axhline(1, color="black", linewidth=1)
    axes.text(len(kinds) - 0.42, 1.05, "Ray", ha="right", va="bottom", fontsize=9)
    axes.set_yscale("log")
    ticker = importlib.import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(base=2))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.minorticks_off()
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("times Ray's rate")
    axes.set_title("Rows per second beside Ray's streaming generators: median, least, most", loc="left")
    _legend(axes)


def _bars_of(axes: Any, at: int, kind: str, found: Compared) -> None:
    names = [name for name in COLORS if name in found.batches]
    for place, name in enumerate(names):
        x = at + (place - (len(names) - 1) / 2) * BAR_WIDTH
        value = ratio(found.batches[name], found.batches["ray"])
        whiskers = [[value.median - value.least], [value.most - value.median]]
        # From 1, which is Ray: what is slower hangs below the line.
        axes.bar(x, value.median - 1, BAR_WIDTH * 0.94, bottom=1, color=COLORS[name])
        axes.errorbar(x, value.median, whiskers, color="black", linewidth=1, capsize=2, fmt="none")
        goal = GOALS.get(kind, {}).get(name, 0.0)
        if goal:
            axes.hlines(goal, x - BAR_WIDTH / 2, x + BAR_WIDTH / 2, color=GOAL, linewidth=2.5, zorder=3)
        _number(axes, x, value, goal)


def _number(axes: Any, x: float, value: Ratio, goal: float) -> None:
    """The median beyond the whisker, and beyond the goal's mark where that would strike it through."""
    above = value.median >= 1
    crossed = value.most <= goal * 1.02 and goal < value.most * 1.3
    beyond = (goal if crossed else value.most) if above else value.least
    axes.annotate(
        f"{value.median:.1f}", (x, beyond), (0, 3 if above else -3), textcoords="offset points",
        ha="center", va="bottom" if above else "top", fontsize=8,
    )  # fmt: skip


def _legend(axes: Any) -> None:
    patches = importlib.import_module("matplotlib.patches")
    lines = importlib.import_module("matplotlib.lines")
    handles = [patches.Patch(color=color, label=LABELS[name]) for name, color in COLORS.items()]
    handles.append(lines.Line2D([], [], color=GOAL, linewidth=2.5, label="goal"))
    axes.legend(handles=handles, frameon=False, fontsize=9, ncols=5, loc="lower center", bbox_to_anchor=(0.5, -0.2))


def _instances(axes: Any, results: Results) -> None:
    _cost_curves(axes, "shards", [point for point in results.instances if point.replicas == 1], results, "#1f6feb")
    _cost_curves(axes, "replicas", [point for point in results.instances if point.shards == 1], results, "#bf8700")
    axes.axhline(COST_GOAL, color=GOAL, linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_ylim(bottom=0.9)
    axes.set_xlabel(f"shards, or replicas of one shard, on {results.machine.cores} cores")
    axes.set_title("Cost per row, of the best", loc="left")
    axes.legend(frameon=False, fontsize=8)


def _cost_curves(axes: Any, name: str, points: list[InstancesPoint], results: Results, color: str) -> None:
    counts = [point.shards * point.replicas for point in points]
    wall = [point.wall_us / results.best_wall_us for point in points]
    cpu = [point.cpu_us / results.best_cpu_us for point in points]
    axes.plot(counts, wall, "o-", color=color, label=f"{name}, wall time")
    axes.plot(counts, cpu, "o--", color=color, alpha=0.5, label=f"{name}, CPU time")


def _growth(axes: Any, results: Results) -> None:
    rows = [point.rows for point in results.growth]
    seconds = [point.seconds for point in results.growth]
    costs = [point.us_per_row for point in results.growth]
    axes.semilogx(rows, costs, "o-", color=PULL)
    axes.set_ylim(0, 1.3 * max(costs))
    axes.set_xlabel("rows in one batch")
    axes.set_title(f"µs per row; time grows as rows^{exponent(rows, seconds):.2f}", loc="left")


def _makespan(axes: Any, results: Results) -> None:
    slots = list(dict.fromkeys(point.slots for point in results.makespan))
    for shift, name, color in ((-0.27, "in_order_s", IN_ORDER), (0.0, "pull_s", PULL), (0.27, "static_s", STATIC)):
        spans = [
            [getattr(point, name) / point.bound_s for point in results.makespan if point.slots == at] for at in slots
        ]
        means = [statistics.mean(of_slots) for of_slots in spans]
        whiskers = [
            [mean - min(of_slots) for mean, of_slots in zip(means, spans, strict=True)],
            [max(of_slots) - mean for mean, of_slots in zip(means, spans, strict=True)],
        ]
        places = [at + shift for at in range(len(slots))]
        axes.bar(places, means, 0.25, yerr=whiskers, capsize=2, color=color, label=ARRANGEMENTS[name])
        for x, of_slots, mean in zip(places, spans, means, strict=True):
            axes.text(x, max(of_slots) + 0.03, f"{mean:.2f}", ha="center", va="bottom", fontsize=8)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(slots)), [f"{at} slots" for at in slots])
    axes.set_title("Makespan, of the lower bound", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.margins(y=0.35)

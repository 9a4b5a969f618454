"""What a job came to: rows, rewards and failures per route, groups and timings per instance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from ...broker.wording import counted
from ...collector import CompletedGroup, GroupFailure
from ...collector.timing import COUNTERS, DEFAULT_PREFIX
from .console import add_row, new_table, out, seconds, show_table
from .result_lines import reward_of

_TIMES = ("queue_wait", "environment", "publish", "postprocess_results")
# So many reasons are shown; a batch may have thousands, and all of them stand in the results.
_REASONS_SHOWN = 3
# The same failure of other rows names other rows.
_NUMBER = re.compile(r"\d+")
ROUTE_COLUMNS = ("route", "rows", "mean reward", "failed rows")
INSTANCE_COLUMNS = ("instance", "groups", "queue wait", "environment", "publish", "postprocess")
# One, and several.
COUNTED = {
    "retries": ("retry", "retries"),
    "redeliveries": ("taken over", "taken over"),
    "stale_writes": ("refused write", "refused writes"),
    "duplicate_rows": ("duplicate row", "duplicate rows"),
}


@dataclass
class RouteTally:
    """Rows of one route, in rows."""

    rows: int = 0
    failures: int = 0
    rewards: list[float] = field(default_factory=list[float])

    @property
    def mean_reward(self) -> float | None:
        """NaN where there is none: of both infinities, or beyond what a float holds."""
        try:
            return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None
        except (ValueError, OverflowError):
            return math.nan


@dataclass
class Alike:
    """Groups that failed for the same reason, given in the first one's words; the others' differ by numbers at most."""

    reason: str
    groups: list[int] = field(default_factory=list[int])
    in_the_same_words: bool = True

    def add(self, group: int, reason: str) -> None:
        self.groups.append(group)
        self.in_the_same_words = self.in_the_same_words and reason == self.reason

    def told(self, route: str) -> str:
        first, count = self.groups[0], len(self.groups)
        if count == 1:
            return f"group {first} ({route}): {self.reason}"
        such = "" if self.in_the_same_words else f", such as group {first}"
        return f"{count} groups of {route}{such}: {self.reason}"


@dataclass
class Summary:
    """Fed group by group; `metrics` and `took_s` come at the end. `labels` are the fleet's instances."""

    groups: int = 0
    completed: int = 0
    failed: int = 0
    routes: dict[str, RouteTally] = field(default_factory=dict[str, RouteTally])
    failures: dict[tuple[str, str], Alike] = field(default_factory=dict[tuple[str, str], Alike])
    labels: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    batch: str = ""
    took_s: float = 0.0

    def add(self, outcome: CompletedGroup | GroupFailure, route: str) -> None:
        tally = self.routes.setdefault(route, RouteTally())
        if isinstance(outcome, CompletedGroup):
            self.completed += 1
            tally.rows += len(outcome.rows)
            tally.rewards += [reward for result in outcome.results if (reward := reward_of(result)) is not None]
            return
        self.failed += 1
        tally.failures += len(outcome.row_indices)
        reason = f"{outcome.type}: {outcome.message}"
        alike = self.failures.setdefault((route, _NUMBER.sub("#", reason)), Alike(reason))
        alike.add(outcome.group_index, reason)

    @property
    def balanced(self) -> bool:
        """Every group of the job came back, and none failed."""
        return self.failed == 0 and self.completed == self.groups

    @property
    def instances(self) -> dict[str, dict[str, float]]:
        """Per instance its groups and times, from the metrics, which know nothing of one that completed none."""
        routing = f"{DEFAULT_PREFIX}/routing/groups/"
        labels = {name.removeprefix(routing) for name in self.metrics if name.startswith(routing)}
        return {
            label: {
                "groups": self.metrics.get(routing + label, 0.0),
                **{name: self.metrics.get(f"{DEFAULT_PREFIX}/shard/{label}/{name}", 0.0) for name in _TIMES},
            }
            for label in sorted(labels | set(self.labels))
        }

    def as_plain(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "groups": self.groups,
            "completed": self.completed,
            "failed": self.failed,
            "cancelled": self.groups - self.completed - self.failed,
            "seconds": self.took_s,
            "routes": {
                route: {"rows": tally.rows, "mean_reward": _finite(tally.mean_reward), "failures": tally.failures}
                for route, tally in sorted(self.routes.items())
            },
            "instances": self.instances,
            "counters": {name: self.metrics.get(f"{DEFAULT_PREFIX}/{name}", 0.0) for name in COUNTERS},
        }


def show(summary: Summary, *, console: Console = out) -> None:
    """Both tables and what there is to say below them."""
    table = new_table("", ROUTE_COLUMNS, ROUTE_COLUMNS[1:])
    for route, tally in sorted(summary.routes.items()):
        mean = tally.mean_reward
        cells = (route, tally.rows, "-" if mean is None else f"{mean:.3f}", tally.failures)
        add_row(table, *cells, style="red" if tally.failures else "")
    show_table(table, console)
    table = new_table("", INSTANCE_COLUMNS, INSTANCE_COLUMNS[1:])
    for label, numbers in summary.instances.items():
        times = (seconds(numbers[name] if numbers["groups"] else None) for name in _TIMES)
        add_row(table, label, int(numbers["groups"]), *times)
    if table.row_count:
        show_table(table, console)
    for line in reasons(summary):
        console.print(line, style="red")
    console.print(verdict(summary), soft_wrap=True)


def reasons(summary: Summary) -> Iterator[str]:
    """Why groups failed, a line per reason, the most frequent first, and how many groups failed for others."""
    found = sorted(summary.failures.items(), key=lambda item: -len(item[1].groups))
    for (route, _), alike in found[:_REASONS_SHOWN]:
        yield alike.told(route)
    if others := sum(len(alike.groups) for _, alike in found[_REASONS_SHOWN:]):
        yield f"and {others} more failed for other reasons, which the results tell"


def verdict(summary: Summary) -> str:
    """One sentence: whether the books balance, how long it took, what happened on the way."""
    rows = sum(tally.rows for tally in summary.routes.values())
    per_s = rows / summary.took_s if summary.took_s > 0 else 0.0
    rate = f", {per_s:.{0 if per_s >= 10 else 1}f} rows/s" if per_s else ""
    cancelled = summary.groups - summary.completed - summary.failed
    groups = counted(summary.groups, "group")
    counts = f"{groups} = {summary.completed} completed + {summary.failed} failed + {cancelled} cancelled"
    events = [
        counted(int(number), *words)
        for name, words in COUNTED.items()
        if (number := summary.metrics.get(f"{DEFAULT_PREFIX}/{name}", 0.0))
    ]
    return f"{counts}; {counted(rows, 'row')} in {seconds(summary.took_s)}{rate}" + (
        f" ({', '.join(events)})" if events else ""
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

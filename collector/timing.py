"""Rolling the instances' times up into a batch's metrics; all metric names of a batch stand here.

Instances run side by side and the step waits for the slowest, so a rolled-up duration is the maximum. Percentages come
from totals.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("rolloutbus.collector")

DEFAULT_PREFIX = "timing/rollout"
AWAIT_RESULTS = "await_results"
POSTPROCESS_RESULTS = "postprocess_results"
POSTPROCESS_PCT = "postprocess_results_pct"
COLLECT = "collect"
GROUPS = "groups"
COUNTERS = ("duplicate_rows", "stale_writes", "redeliveries", "retries", "dead_groups")


def merge_timing_metrics(timing_by_instance: Mapping[str, Mapping[str, float]], timer_prefix: str) -> dict[str, float]:
    """Merge what instances report, `{label: {"{prefix}/{name}": seconds or percent}}`, into one flat dict.

    One instance: exactly what it reported. Several: each number under `{prefix}/shard/{label}/{name}`, and their
    maximum under `{prefix}/{name}`.
    """
    if len(timing_by_instance) == 1:
        return dict(next(iter(timing_by_instance.values())))
    merged: dict[str, float] = {}
    for label, timings in timing_by_instance.items():
        merged.update(shard_keys(label, timings, timer_prefix))
        for name, value in timings.items():
            merged[name] = max(value, merged.get(name, value))
    return merged


def shard_keys(label: str, timings: Mapping[str, float], prefix: str) -> dict[str, float]:
    """One instance's numbers under its own keys."""
    return {f"{prefix}/shard/{label}/{name.removeprefix(prefix + '/')}": value for name, value in timings.items()}


def percentage(part: float, rest: float) -> float:
    """`part` of the whole, in percent; 0 where there is no whole."""
    return 100.0 * part / (part + rest) if part + rest > 0 else 0.0


class TimingLedger:
    """What each instance said of one batch. A restarted instance counts from zero again, so totals are kept per
    incarnation.
    """

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, dict[str, float]]] = {}
        self._last: dict[str, str] = {}
        self._groups: dict[str, int] = {}

    def count_group(self, label: str) -> None:
        self._groups[label] = self._groups.get(label, 0) + 1

    def note(self, label: str, packed: str) -> None:
        """Totals as the worker packs them; later ones replace earlier ones of the same incarnation."""
        # Groups that ended together say the same.
        if not packed or packed == self._last.get(label):
            return
        self._last[label] = packed
        try:
            totals: dict[str, Any] = json.loads(packed)
            incarnation = str(totals.pop("incarnation", ""))
            seconds = {name: float(value) for name, value in totals.items()}
        except (ValueError, TypeError, AttributeError) as error:
            # Times are no reason to lose results.
            log.warning("the times that %s reports cannot be read (%s)", label, error)
            return
        self._totals.setdefault(label, {})[incarnation] = seconds

    def metrics(self, prefix: str, collect_s: float) -> dict[str, float]:
        """Everything of section 8: per instance, rolled up, exact share over the batch, routing."""
        by_instance = {label: self._instance(label, prefix) for label in self._totals}
        merged: dict[str, float] = {}
        for label, timings in by_instance.items():
            merged.update(shard_keys(label, timings, prefix))
        if by_instance:
            merged.update(merge_timing_metrics(by_instance, prefix))
        merged[f"{prefix}/{COLLECT}"] = collect_s
        awaited = sum(timings.get(f"{prefix}/{AWAIT_RESULTS}", 0.0) for timings in by_instance.values())
        processed = sum(timings.get(f"{prefix}/{POSTPROCESS_RESULTS}", 0.0) for timings in by_instance.values())
        merged[f"{prefix}/batch/{POSTPROCESS_PCT}"] = percentage(processed, awaited)
        for label, groups in self._groups.items():
            merged[f"{prefix}/routing/groups/{label}"] = float(groups)
        return merged

    def _instance(self, label: str, prefix: str) -> dict[str, float]:
        summed: dict[str, float] = {}
        for totals in self._totals[label].values():
            for name, value in totals.items():
                if name != GROUPS:
                    summed[name] = summed.get(name, 0.0) + value
        # An environment that waits and post-processes in one is awaited for as long as it runs.
        summed.setdefault(AWAIT_RESULTS, summed.get("environment", 0.0))
        summed.setdefault(POSTPROCESS_RESULTS, 0.0)
        summed[POSTPROCESS_PCT] = percentage(summed[POSTPROCESS_RESULTS], summed[AWAIT_RESULTS])
        return {f"{prefix}/{name}": value for name, value in summed.items()}

"""Where an instance's time goes: groups overlap, so durations are unions of intervals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rolloutbus.shard_workers import timing as timing_module
from rolloutbus.shard_workers.timing import BatchTiming, InstanceTiming


def packed(timing: InstanceTiming, batch: str) -> dict[str, Any]:
    return json.loads(timing.packed(batch))


def test_time_of_groups_that_overlap_counts_once() -> None:
    timing = BatchTiming()
    timing.add("environment", 0.0, 10.0)
    timing.add("environment", 5.0, 12.0)
    timing.add("publish", 12.0, 13.0)
    assert timing.totals() == {"environment": 12.0, "publish": 1.0, "groups": 0}


def test_time_spent_in_the_event_loop_adds_up() -> None:
    timing = BatchTiming()
    timing.spend("postprocess_results", 1.0)
    timing.spend("postprocess_results", 0.5)
    assert timing.totals()["postprocess_results"] == 1.5


def test_what_the_environment_reports_of_itself_stands_beside_it() -> None:
    timing = BatchTiming()
    timing.report("await_results", 7.0)
    timing.report("await_results", 8.0)
    timing.count_group()
    assert timing.totals() == {"await_results": 8.0, "groups": 1}


def test_batches_are_kept_apart_and_travel_with_the_incarnation() -> None:
    timing = InstanceTiming("abc")
    timing.of("one").add("environment", 0.0, 1.0)
    timing.of("other").add("environment", 0.0, 2.0)
    assert packed(timing, "one") == {"incarnation": "abc", "environment": 1.0, "groups": 0}
    assert packed(timing, "other")["environment"] == 2.0


def test_times_of_batches_long_over_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_module, "_BATCHES_KEPT", 2)
    timing = InstanceTiming("abc")
    for batch in ("one", "two", "three"):
        timing.of(batch).count_group()
    assert packed(timing, "two")["groups"] == packed(timing, "three")["groups"] == 1
    assert packed(timing, "one")["groups"] == 0

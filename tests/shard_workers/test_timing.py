"""Where an instance's time goes: groups overlap, so durations are unions of intervals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rolloutbus.shard_workers import timing as timing_module
from rolloutbus.shard_workers.timing import BatchTiming, InstanceTiming


def packed(timing: InstanceTiming, batch: str) -> dict[str, Any]:
    return json.loads(timing.packed(batch))


class Clock:
    """Stands in for `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing_module, "time", clock)
    return clock


def test_time_of_groups_that_overlap_counts_once(clock: Clock) -> None:
    timing = BatchTiming()
    with timing.going_on("environment"):
        clock.now += 5.0
        with timing.going_on("environment"):
            clock.now += 5.0
            assert timing.totals() == {"environment": 10.0, "groups": 0}
        clock.now += 2.0
    clock.now += 50.0
    with timing.going_on("environment"), timing.going_on("publish"):
        clock.now += 1.0
    assert timing.totals() == {"environment": 13.0, "publish": 1.0, "groups": 0}


def test_time_that_an_error_ends_counts_as_well(clock: Clock) -> None:
    timing = BatchTiming()

    def fail_after_a_while() -> None:
        with timing.going_on("environment"):
            clock.now += 3.0
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail_after_a_while()
    clock.now += 3.0
    assert timing.totals()["environment"] == 3.0


def test_time_known_only_afterwards_counts_once_where_it_overlaps() -> None:
    timing = BatchTiming()
    timing.add("queue_wait", 0.0, 10.0)
    timing.add("queue_wait", 5.0, 12.0)
    assert timing.totals()["queue_wait"] == 12.0


def test_time_spent_in_the_event_loop_adds_up() -> None:
    timing = BatchTiming()
    timing.spend("postprocess_results", 1.0)
    timing.spend("postprocess_results", 0.5)
    assert timing.totals()["postprocess_results"] == 1.5


def test_batches_are_kept_apart_and_travel_with_the_incarnation() -> None:
    timing = InstanceTiming("abc")
    timing.of("one").add("queue_wait", 0.0, 1.0)
    timing.of("other").add("queue_wait", 0.0, 2.0)
    assert packed(timing, "one") == {"incarnation": "abc", "queue_wait": 1.0, "groups": 0}
    assert packed(timing, "other")["queue_wait"] == 2.0


def test_times_of_batches_long_over_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_module, "_BATCHES_KEPT", 2)
    timing = InstanceTiming("abc")
    for batch in ("one", "two", "three"):
        timing.of(batch).count_group()
    assert packed(timing, "two")["groups"] == packed(timing, "three")["groups"] == 1
    assert packed(timing, "one")["groups"] == 0

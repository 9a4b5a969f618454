"""Section 8: every instance's own numbers, their maximum, shares from totals, and who got how many groups."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.collector import merge_timing_metrics
from rolloutbus.collector.timing import TimingLedger, percentage

P = "timing/rollout"
NAMES = st.sampled_from([f"{P}/{name}" for name in ("await_results", "postprocess_results", "queue_wait", "odd/name")])
TIMES = st.dictionaries(NAMES, st.floats(0, 1e6))


@given(st.text(min_size=1, max_size=5), TIMES)
def test_one_instance_gives_exactly_what_it_reported(label: str, times: dict[str, float]) -> None:
    assert merge_timing_metrics({label: times}, P) == times


def test_several_instances_give_their_own_numbers_and_the_maximum() -> None:
    merged = merge_timing_metrics(
        {
            "math/0": {f"{P}/await_results": 4.0, f"{P}/postprocess_results_pct": 10.0},
            "math/1": {f"{P}/await_results": 9.0, f"{P}/postprocess_results_pct": 5.0, f"{P}/extra": 1.0},
        },
        P,
    )
    assert merged == {
        f"{P}/shard/math/0/await_results": 4.0,
        f"{P}/shard/math/0/postprocess_results_pct": 10.0,
        f"{P}/shard/math/1/await_results": 9.0,
        f"{P}/shard/math/1/postprocess_results_pct": 5.0,
        f"{P}/shard/math/1/extra": 1.0,
        f"{P}/await_results": 9.0,
        f"{P}/postprocess_results_pct": 10.0,
        f"{P}/extra": 1.0,
    }


@given(st.dictionaries(st.sampled_from(["a", "b/0", "b/1"]), TIMES, min_size=2))
def test_each_rolled_up_number_is_the_maximum_of_the_instances(reported: dict[str, dict[str, float]]) -> None:
    merged = merge_timing_metrics(reported, P)
    for name in {name for times in reported.values() for name in times}:
        assert merged[name] == max(times[name] for times in reported.values() if name in times)
    for label, times in reported.items():
        for name, value in times.items():
            assert merged[f"{P}/shard/{label}/{name.removeprefix(P + '/')}"] == value


def test_no_instance_gives_no_numbers() -> None:
    assert merge_timing_metrics({}, P) == {}


def packed(incarnation: str = "i", **totals: float) -> str:
    return json.dumps({"incarnation": incarnation, **totals})


def test_a_ledger_of_one_instance_has_its_numbers_under_both_names() -> None:
    ledger = TimingLedger()
    ledger.note("math", packed(await_results=3.0, postprocess_results=1.0, groups=2))
    metrics = ledger.metrics(P, collect_s=0.5)
    assert metrics[f"{P}/await_results"] == metrics[f"{P}/shard/math/await_results"] == 3.0
    assert metrics[f"{P}/postprocess_results_pct"] == metrics[f"{P}/shard/math/postprocess_results_pct"] == 25.0
    assert metrics[f"{P}/batch/postprocess_results_pct"] == 25.0
    assert metrics[f"{P}/collect"] == 0.5
    assert f"{P}/groups" not in metrics


def test_the_rolled_up_share_is_the_worst_and_the_batch_share_is_exact() -> None:
    ledger = TimingLedger()
    ledger.note("a", packed(await_results=90.0, postprocess_results=10.0))
    ledger.note("b", packed(await_results=1.0, postprocess_results=1.0))
    metrics = ledger.metrics(P, 0.0)
    assert metrics[f"{P}/postprocess_results_pct"] == 50.0
    assert metrics[f"{P}/batch/postprocess_results_pct"] == pytest.approx(100 * 11 / 102)
    assert metrics[f"{P}/await_results"] == 90.0


def test_later_totals_replace_earlier_ones_of_one_process_and_add_up_over_two() -> None:
    ledger = TimingLedger()
    ledger.note("a", packed("first", await_results=1.0))
    ledger.note("a", packed("first", await_results=3.0))
    ledger.note("a", packed("second", await_results=2.0))
    assert ledger.metrics(P, 0.0)[f"{P}/await_results"] == 5.0


def test_an_environment_that_says_nothing_of_waiting_is_awaited_while_it_runs() -> None:
    ledger = TimingLedger()
    ledger.note("a", packed(environment=4.0))
    metrics = ledger.metrics(P, 0.0)
    assert metrics[f"{P}/await_results"] == 4.0
    assert metrics[f"{P}/postprocess_results"] == 0.0
    assert metrics[f"{P}/postprocess_results_pct"] == 0.0


def test_groups_are_counted_per_instance() -> None:
    ledger = TimingLedger()
    for label in ("a/0", "a/1", "a/0"):
        ledger.count_group(label)
    metrics = ledger.metrics("mine", 0.0)
    assert metrics["mine/routing/groups/a/0"] == 2.0
    assert metrics["mine/routing/groups/a/1"] == 1.0


@pytest.mark.parametrize("nonsense", ["{", "[1]", '{"await_results": "long"}', '{"await_results": null}'])
def test_times_that_cannot_be_read_are_told_and_cost_nothing_else(
    nonsense: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = TimingLedger()
    ledger.note("a", packed(await_results=1.0))
    with caplog.at_level(logging.WARNING, "rolloutbus.collector"):
        ledger.note("a", nonsense)
    assert "times that a reports cannot be read" in caplog.text
    assert ledger.metrics(P, 0.0)[f"{P}/await_results"] == 1.0


def test_without_any_time_a_share_is_zero() -> None:
    assert percentage(0.0, 0.0) == 0.0
    assert percentage(1.0, 3.0) == 25.0

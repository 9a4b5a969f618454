from __future__ import annotations

import pytest

from benchmarks.contest import Measurement
from benchmarks.figures import cpu_s_per_1000_rows, exponent, in_order, lower_bound, percentile, ratio
from tests.benchmarks.samples import measured

SIZES = [1_000, 3_000, 10_000, 100_000]


@pytest.mark.parametrize("power", [0.9, 1.0, 2.0])
def test_the_exponent_is_the_power_by_which_time_grows(power: float) -> None:
    assert exponent(SIZES, [0.003 * size**power for size in SIZES]) == pytest.approx(power)


def test_a_start_up_cost_makes_the_exponent_smaller_than_one() -> None:
    assert exponent(SIZES, [1.0 + size / 1_000 for size in SIZES]) < 1


def test_the_lower_bound_is_the_work_over_all_slots_where_no_group_is_longer() -> None:
    assert lower_bound([1.0, 2.0, 3.0, 2.0], slots=2) == 4.0


def test_the_lower_bound_is_the_longest_group_where_slots_are_plenty() -> None:
    assert lower_bound([1.0, 2.0, 9.0], slots=100) == 9.0


def test_in_order_the_next_group_goes_to_the_slot_that_is_free_first() -> None:
    # 3 and 1 begin; 1's slot takes the 4; 3's slot takes the 1, and then the 2.
    assert in_order([3.0, 1.0, 4.0, 1.0, 2.0], slots=2) == 6.0


def test_no_order_beats_the_lower_bound() -> None:
    durations = [0.3, 1.0, 0.2, 0.7, 2.5]
    assert in_order(durations, 3) >= lower_bound(durations, 3)


def test_a_ratio_is_of_the_bases_median_with_the_slowest_and_fastest_repeat() -> None:
    found = ratio(measured(900.0, 1_000.0, 1_500.0), measured(1.0, 100.0, 400.0))
    assert (found.median, found.least, found.most) == (10.0, 9.0, 15.0)


def test_percentiles_hold_at_both_ends() -> None:
    values = [float(at) for at in range(100, 0, -1)]
    assert (percentile(values, 0.0), percentile(values, 0.5), percentile(values, 1.0)) == (1.0, 51.0, 100.0)


def test_cpu_time_is_of_all_repeats_together_and_nothing_for_a_role_that_is_not_there() -> None:
    repeats = [Measurement(1.0, cpu_s={"broker": seconds}) for seconds in (0.0, 0.01, 0.02)]
    assert cpu_s_per_1000_rows(repeats, "broker", rows=500) == pytest.approx(0.02)
    assert cpu_s_per_1000_rows(repeats, "trainer", rows=500) == 0

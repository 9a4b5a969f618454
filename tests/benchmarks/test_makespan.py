from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.makespan import GROUP_SIZE, STRAGGLER_S, durations, rows_of


def test_a_seed_always_draws_the_same_durations() -> None:
    assert durations(1) == durations(1)
    assert durations(1) != durations(2)


def test_two_in_a_hundred_groups_are_stragglers() -> None:
    assert durations(1, groups=400).count(STRAGGLER_S) == 8


@pytest.mark.parametrize(("shards", "each"), [(1, 8), (4, 2)])
def test_groups_are_dealt_in_turn(shards: int, each: int) -> None:
    rows = rows_of([0.1] * 8, shards)
    routes = Counter(row["agent_ref"]["name"] for row in rows)
    assert routes == {f"route{at}": each * GROUP_SIZE for at in range(shards)}


def test_the_rows_of_a_group_take_its_time_together() -> None:
    rows = rows_of([1.0, 3.0], 1)
    assert [sum(row["sleep_s"] for row in rows[at : at + GROUP_SIZE]) for at in (0, GROUP_SIZE)] == [1.0, 3.0]

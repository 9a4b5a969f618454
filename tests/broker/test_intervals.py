"""The union of intervals is measured as a count of covered points would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker.intervals import IntervalUnion

POINTS = st.integers(-20, 20)


def covered(*intervals: tuple[float, float]) -> float:
    union = IntervalUnion()
    for start, end in intervals:
        union.add(start, end)
    return union.total


def test_overlapping_time_counts_once():
    assert covered((0, 2), (1, 3)) == 3
    assert covered((0, 10), (2, 3)) == 10
    assert covered((2, 3), (0, 10)) == 10


def test_what_lies_apart_adds_up_and_what_touches_joins():
    assert covered((0, 1), (2, 3)) == 2
    assert covered((0, 1), (2, 3), (1, 2)) == 3


def test_empty_and_reversed_intervals_cover_nothing():
    assert covered((1, 1), (3, 2)) == 0


@given(st.lists(st.tuples(POINTS, POINTS), max_size=30))
def test_any_intervals_in_any_order_cover_what_they_cover(intervals: list[tuple[int, int]]):
    seconds = {second for start, end in intervals for second in range(start, end)}
    assert covered(*intervals) == len(seconds)
    assert covered(*reversed(intervals)) == len(seconds)

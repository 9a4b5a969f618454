"""Putting rows back into groups, whatever the order in which they come, and naming exactly what did not come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker.errors import RolloutBusError, RouteError
from rolloutbus.collector import MissingRowsError, PromptGroupAccumulator


def rows(count: int, route: str = "a") -> list[dict[str, Any]]:
    return [{"agent_ref": {"name": route}, "n": at} for at in range(count)]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[int]]:
    size = draw(st.integers(1, 5))
    groups = draw(st.integers(1, 6))
    return size, draw(st.permutations(range(size * groups)))


@given(arrivals())
def test_any_order_of_arrival_gives_the_same_groups_in_input_order(case: tuple[int, list[int]]) -> None:
    size, order = case
    accumulator = PromptGroupAccumulator(rows(len(order)), size)
    completed: dict[int, list[Any]] = {}
    for index in order:
        assert not accumulator.is_complete
        results = accumulator.add(index, f"result {index}")
        if results is not None:
            completed[index // size] = results
    assert accumulator.is_complete
    accumulator.finish()
    wanted = {group: [f"result {group * size + at}" for at in range(size)] for group in range(len(order) // size)}
    assert completed == wanted
    assert list(completed) == list(
        dict.fromkeys(g for g in sorted(wanted, key=lambda g: max(order.index(g * size + at) for at in range(size))))
    )


@given(arrivals(), st.data())
def test_any_subset_of_rows_lost_is_named_exactly(case: tuple[int, list[int]], data: st.DataObject) -> None:
    size, order = case
    lost = set(data.draw(st.lists(st.sampled_from(order), unique=True, min_size=1)))
    accumulator = PromptGroupAccumulator(rows(len(order)), size)
    for index in order:
        if index not in lost:
            accumulator.add(index, index)
    with pytest.raises(MissingRowsError) as caught:
        accumulator.finish()
    assert caught.value.row_indices == tuple(sorted(lost))
    assert accumulator.missing() == sorted(lost)
    assert f"{len(lost)} rows" in str(caught.value)


@given(arrivals(), st.data())
def test_rows_of_a_group_that_was_given_up_are_missed_by_nobody(
    case: tuple[int, list[int]], data: st.DataObject
) -> None:
    size, order = case
    failed = data.draw(st.integers(0, len(order) // size - 1))
    accumulator = PromptGroupAccumulator(rows(len(order)), size)
    accumulator.give_up(failed)
    accumulator.give_up(failed)
    for index in order:
        if index // size != failed:
            accumulator.add(index, index)
    assert accumulator.has(failed * size)
    assert accumulator.is_complete
    accumulator.finish()


@pytest.mark.parametrize(
    ("index", "result", "family", "words"),
    [
        (True, {}, TypeError, "True"),
        ("1", {}, TypeError, "'1'"),
        (None, {}, TypeError, "None"),
        (-1, {}, ValueError, "-1 is outside this batch of 4 rows"),
        (4, {}, ValueError, "4 is outside this batch of 4 rows"),
        (2, None, ValueError, "row 2 came back with None"),
        (0, {}, ValueError, "row 0 came back twice"),
    ],
)
def test_what_is_no_result_of_this_batch_is_refused_and_changes_nothing(
    index: Any, result: Any, family: type, words: str
) -> None:
    accumulator = PromptGroupAccumulator(rows(4), 2)
    accumulator.add(0, "first")
    with pytest.raises(RolloutBusError, match=words) as caught:
        accumulator.add(index, result)
    assert isinstance(caught.value, family)
    assert accumulator.missing() == [1, 2, 3]
    assert accumulator.add(1, "second") == ["first", "second"]


def test_a_row_of_a_complete_group_comes_back_twice_too() -> None:
    accumulator = PromptGroupAccumulator(rows(2), 1)
    accumulator.add(0, "x")
    with pytest.raises(ValueError, match="row 0 came back twice"):
        accumulator.add(0, "y")


def test_results_that_are_false_are_results() -> None:
    accumulator = PromptGroupAccumulator(rows(2), 2)
    accumulator.add(1, 0)
    assert accumulator.add(0, {}) == [{}, 0]


@pytest.mark.parametrize(("count", "size"), [(0, 1), (3, 2), (2, 0), (2, -1)])
def test_rows_that_are_no_whole_groups_are_refused(count: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        PromptGroupAccumulator(rows(count), size)


def test_a_group_that_mixes_routes_is_refused_unless_allowed() -> None:
    mixed = [*rows(2), *rows(1, "x"), *rows(1, "y")]
    with pytest.raises(RouteError, match="begins at row 2 mixes routes: x, y"):
        PromptGroupAccumulator(mixed, 2)
    assert PromptGroupAccumulator(mixed, 2, allow_mixed_routes=True).missing() == [0, 1, 2, 3]


def test_many_missing_rows_are_all_known_and_some_shown() -> None:
    with pytest.raises(MissingRowsError, match=r"50 rows have no result: 0, 1, .*, …") as caught:
        PromptGroupAccumulator(rows(50), 5).finish()
    assert len(caught.value.row_indices) == 50


def test_a_group_that_comes_whole_is_taken_whole_and_once() -> None:
    accumulator = PromptGroupAccumulator(rows(6), 3)
    assert accumulator.add_group(1, ["d", "e", "f"])
    assert accumulator.has_ended(1)
    assert not accumulator.add_group(1, ["d", "e", "f"])
    assert accumulator.missing() == [0, 1, 2]


def test_a_group_that_is_begun_short_or_holds_none_is_not_taken_whole() -> None:
    accumulator = PromptGroupAccumulator(rows(9), 3)
    accumulator.add(0, "a")
    assert not accumulator.add_group(0, ["a", "b", "c"])
    assert not accumulator.add_group(1, ["d", "e"])
    assert not accumulator.add_group(2, ["g", None, "i"])
    assert accumulator.missing() == [1, 2, 3, 4, 5, 6, 7, 8]

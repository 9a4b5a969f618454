"""Checking, stamping, grouping and routing rows: what is wrong is said by name, and nothing is changed before it is
right.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker.errors import RolloutBusError, RouteError, RowError, RowTypeError
from rolloutbus.producer import (
    begins_with_mixed_prompts,
    bucket_groups_by_shard,
    check_rows,
    own_rows,
    plan_groups,
    route_of,
    stamp_row_indices,
)

ROUTES = {"a": "left", "b": "right", "c": "left"}


def row(route: str = "a", **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "x"}, "agent_ref": {"name": route}, **more}


def rows(*routes: str) -> list[dict[str, Any]]:
    return [row(route) for route in routes]


@pytest.mark.parametrize(
    ("bad", "size", "family", "words"),
    [
        ([], 2, ValueError, ["empty"]),
        (rows("a", "a", "a"), 2, ValueError, ["3 rows", "num_generations=2", "last group has 1"]),
        (rows("a"), 0, ValueError, ["num_generations", "0"]),
        (rows("a"), -3, ValueError, ["num_generations", "-3"]),
        (rows("a"), True, TypeError, ["num_generations", "True"]),
        (rows("a"), 1.0, TypeError, ["num_generations", "1.0"]),
        (rows("a"), "1", TypeError, ["num_generations", "'1'"]),
        ((row() for _ in range(2)), 2, TypeError, ["generator", "list"]),
        ([row(), "text"], 2, TypeError, ["row 1", "str", "dict"]),
        ([row(), None], 1, TypeError, ["row 1", "NoneType"]),
        ([{"agent_ref": {"name": "a"}}], 1, TypeError, ["row 0", "responses_create_params"]),
        ([row(), row(responses_create_params=[1])], 1, TypeError, ["row 1", "responses_create_params", "list"]),
        ([row(), row(responses_create_params=None)], 1, TypeError, ["row 1", "NoneType"]),
    ],
)
def test_a_batch_that_cannot_be_published_is_refused_by_name(
    bad: Any, size: Any, family: type, words: list[str]
) -> None:
    with pytest.raises(RolloutBusError) as caught:
        check_rows(bad, size)
    assert isinstance(caught.value, family)
    assert [word for word in words if word not in str(caught.value)] == []


def test_one_dict_in_two_places_is_refused_because_it_can_have_one_index_only() -> None:
    twice = row()
    with pytest.raises(RowError, match="rows 0 and 2 are one and the same dict"):
        check_rows([twice, row(), twice, row()], 2)


def test_checking_changes_nothing() -> None:
    batch = rows("a", "a")
    before = copy.deepcopy(batch)
    check_rows(batch, 2)
    assert batch == before


def test_stamping_numbers_the_whole_batch_in_place() -> None:
    batch = rows("a", "b", "a")
    batch[1]["_rowidx"] = 77
    assert stamp_row_indices(batch) is batch
    assert [one["_rowidx"] for one in batch] == [0, 1, 2]


@pytest.mark.parametrize(
    "lost", [{}, {"agent_ref": {}}, {"agent_ref": {"name": ""}}, {"task_source": ""}, {"agent_ref": "a"}]
)
def test_a_row_without_a_route_is_refused_with_its_number(lost: dict[str, Any]) -> None:
    bad: dict[str, Any] = {"responses_create_params": {}, **lost}
    with pytest.raises(RouteError, match=r"row 3: .*agent_ref.*task_source"):
        plan_groups([*rows("a", "a", "a"), bad], ROUTES, 2)


def test_a_row_routes_by_its_agent_before_its_task_source() -> None:
    assert route_of({"agent_ref": {"name": "a"}, "task_source": "b"}) == "a"
    assert route_of({"task_source": "b"}) == "b"
    plan = plan_groups([{"responses_create_params": {}, "task_source": "b"}], ROUTES, 1)
    assert [(group.route, group.shard) for group in plan] == [("b", "right")]


@pytest.mark.parametrize("mixed", [("a", "c"), ("a", "b")])
def test_a_group_that_mixes_routes_is_refused_on_one_shard_and_across_two(mixed: tuple[str, str]) -> None:
    with pytest.raises(RouteError, match=rf"begins at row 2 mixes routes: {mixed[0]}, {mixed[1]}") as caught:
        plan_groups([*rows("a", "a"), *rows(*mixed)], ROUTES, 2)
    assert isinstance(caught.value, ValueError)


def test_a_route_nobody_hosts_is_named_with_the_hosted_ones() -> None:
    with pytest.raises(RouteError, match=r"row 2: no shard hosts the route 'z'; hosted: a, b, c"):
        plan_groups(rows("a", "a", "z", "z"), ROUTES, 2)


def test_without_shards_every_route_is_hosted() -> None:
    plan = plan_groups(rows("x", "y"), {"*": "nemo_gym"}, 1)
    assert [(group.route, group.shard) for group in plan] == [("x", "nemo_gym"), ("y", "nemo_gym")]


def test_groups_know_their_place_in_the_batch() -> None:
    batch = rows("b", "b", "a", "a")
    plan = plan_groups(batch, ROUTES, 2)
    assert [(g.index, g.first_row, g.route, g.shard) for g in plan] == [(0, 0, "b", "right"), (1, 2, "a", "left")]
    assert [list(g.rows) for g in plan] == [batch[:2], batch[2:]]


def test_buckets_stand_in_first_use_order_with_groups_in_input_order() -> None:
    batch = rows("b", "b", "a", "a", "b", "b", "c", "c")
    buckets = bucket_groups_by_shard(batch, ROUTES, 2)
    assert list(buckets) == ["right", "left"]
    assert [list(group) for group in buckets["right"]] == [batch[0:2], batch[4:6]]
    assert [list(group) for group in buckets["left"]] == [batch[2:4], batch[6:8]]
    assert buckets["right"][0][0] is batch[0]


def test_bucketing_checks_the_rows_first() -> None:
    with pytest.raises(RowTypeError, match="row 1"):
        bucket_groups_by_shard([row(), "text"], ROUTES, 1)  # pyright: ignore[reportArgumentType]


@given(st.lists(st.sampled_from(sorted(ROUTES)), min_size=1, max_size=12), st.integers(1, 4))
def test_bucketing_loses_and_doubles_no_row(routes: list[str], size: int) -> None:
    batch = stamp_row_indices([row(route) for route in routes for _ in range(size)])
    buckets = bucket_groups_by_shard(batch, ROUTES, size)
    indices = sorted(one["_rowidx"] for groups in buckets.values() for group in groups for one in group)
    assert indices == list(range(len(batch)))
    for shard, groups in buckets.items():
        assert {ROUTES[route_of(group[0])] for group in groups} == {shard}
        assert all(
            [one["_rowidx"] for one in group] == list(range(group[0]["_rowidx"], group[0]["_rowidx"] + size))
            for group in groups
        )


def test_own_rows_are_another_list_of_the_same_dicts() -> None:
    class Dict(dict[str, Any]):
        pass

    for his in (rows("a", "b"), tuple(rows("a", "b")), [Dict(row())]):
        mine = own_rows(his)
        assert mine is not his
        assert all(one is other for one, other in zip(mine, his, strict=True))
    assert own_rows([]) == []


@pytest.mark.parametrize("wrong", ["ab", b"ab", {"a": 1}, {1}, 5, None, iter([row()])])
def test_what_is_no_list_is_named(wrong: Any) -> None:
    with pytest.raises(RowTypeError, match=f"the rows are a {type(wrong).__name__}; give a list of dicts"):
        own_rows(wrong)
    with pytest.raises(RowTypeError, match="the rows are a"):
        check_rows(wrong, 1)


def test_own_rows_name_the_first_that_is_no_dict() -> None:
    with pytest.raises(RowTypeError, match="row 1 is a str; each row must be a dict"):
        own_rows([row(), "text", 5])


@pytest.mark.parametrize(
    ("inputs", "mixed"),
    [
        (["x", "x", "y", "y"], False),
        (["x", "y", "x", "y"], True),
        ([None, None], False),
        ([[{"content": "x"}], [{"content": "x"}]], False),
        ([[{"content": "x"}], [{"content": "y"}]], True),
        ([np.arange(3), np.arange(3)], False),
        ([[np.arange(3)], [np.arange(3)]], False),
    ],
)
def test_a_batch_whose_first_group_has_several_prompts_is_seen(inputs: list[Any], mixed: bool) -> None:
    rows = [{"responses_create_params": {} if it is None else {"input": it}} for it in inputs]
    assert begins_with_mixed_prompts(rows, 2) is mixed
    assert begins_with_mixed_prompts(rows, 1) is False

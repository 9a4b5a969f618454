"""The fleet's schedules: what a seed stands for, and that each kind of operation that it may draw exists."""

from __future__ import annotations

import pytest

from tests.chaos.fleet import OPERATIONS
from tests.chaos.fleet_asking import failure
from tests.chaos.fleet_plan import KINDS, NODES, ONE_NODE_EACH, make_fleet_plan


def test_a_seed_gives_the_same_plan_again() -> None:
    assert make_fleet_plan(7) == make_fleet_plan(7) != make_fleet_plan(8)


def test_each_kind_of_operation_is_drawn_and_can_be_done() -> None:
    drawn = {operation.kind for seed in range(200) for operation in make_fleet_plan(seed).operations}
    assert drawn == set(KINDS) == set(OPERATIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_kinds_that_were_asked_for_are_drawn(kind: str) -> None:
    plans = [make_fleet_plan(seed, [kind]) for seed in range(20)]
    assert {operation.kind for plan in plans for operation in plan.operations} == {kind}


def test_instances_get_nodes_of_their_own_only_where_there_are_enough() -> None:
    plans = [make_fleet_plan(seed) for seed in range(200)]
    sizes = {sum(s.replicas for s in plan.plan.shards) for plan in plans if plan.strategy == ONE_NODE_EACH}
    assert sizes
    assert max(sizes) <= NODES


def test_the_last_error_of_a_command_is_its_reason() -> None:
    said = "12:00:00 WARNING cli: waiting for the broker\nError: drain a/1: there is no instance\n"
    assert failure(said, 1) == "drain a/1: there is no instance"
    assert failure("", 137) == "exit code 137"

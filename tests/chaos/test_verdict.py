"""The verdict itself: each promise, broken in the evidence alone, is noticed; a driver that cannot fail is no proof."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.evidence import Evidence
from tests.chaos.plan import Plan, make_plan
from tests.chaos.verdict import violations


def small_plan() -> Plan:
    """The first plan of one batch on one shard that commits whole groups, its planned trouble left out."""
    plan = next(
        plan
        for seed in range(1000)
        if len((plan := make_plan(seed, "kill-read")).batches) == 1
        and [shard.commit for shard in plan.shards] == ["group"]
        and plan.batches[0].size == 2
    )
    rows = [{**row, "trouble": ""} for row in plan.batches[0].rows[:4]]
    return replace(plan, batches=(replace(plan.batches[0], rows=rows),))


def result(plan: Plan, row: int, **words: Any) -> dict[str, Any]:
    made = {"row": row, "key": plan.batches[0].rows[row]["key"], "label": "scored/0", "attempt": 1, "call": "c"}
    return {**made, **words}


def group(plan: Plan, index: int) -> dict[str, Any]:
    results = [result(plan, 2 * index), result(plan, 2 * index + 1)]
    line = {"kind": "group", "number": 0, "id": f"b:{index}", "index": index, "results": results}
    return {**line, "origins": [["scored/0", 1]] * 2}


def event(kind: str, index: int, detail: str = "") -> dict[str, str]:
    return {"kind": kind, "batch": "b", "group": str(index), "detail": detail}


def kept() -> Evidence:
    """Evidence of a schedule in which all went well."""
    plan = small_plan()
    counts = {"published": 2, "completed": 2, "failed": 0, "cancelled": 0}
    journal = [
        {"kind": "batch", "number": 0, "batch": "b"},
        group(plan, 0),
        group(plan, 1),
        {"kind": "closed", "number": 0, "batch": "b", "counts": counts},
    ]
    events = [event("published", 0), event("published", 1), event("finished", 0, "all"), event("finished", 1, "all")]
    keys = {"rolloutbus:{chaos}:events": ("stream", -1, 9), "rolloutbus:{chaos}:groups:scored": ("stream", 900, 0)}
    return Evidence(plan, journal, events, keys, trainer_crashed=False, trainer_gone=False, data_lost=False)


def with_line(evidence: Evidence, at: int, **words: Any) -> Evidence:
    journal = [{**line, **words} if place == at else line for place, line in enumerate(evidence.journal)]
    return replace(evidence, journal=journal)


def test_a_schedule_that_went_well_violates_nothing() -> None:
    assert violations(kept()) == []


def broken() -> dict[str, Evidence]:
    """Per violation, by a part of its text, evidence that shows it."""
    good = kept()
    plan = good.plan
    swapped = [result(plan, 1), result(plan, 0)]
    strangers = [result(plan, 0, label="scored/1"), result(plan, 1)]
    mixed = [result(plan, 0, call="d"), result(plan, 1)]
    unbalanced = {"published": 2, "completed": 1, "failed": 0, "cancelled": 1}
    failure = {"kind": "failure", "number": 0, "id": "b:0", "index": 0, "why": "InstanceDied: 5 instances"}
    row = {"kind": "row", "number": 0, "batch": "b", "row": 0, "result": result(plan, 0)}
    left = {"rolloutbus:{chaos}:batch:b": ("hash", -1, -1)}
    return {
        "never handed over": replace(good, journal=[*good.journal[:2], good.journal[3]]),
        "handed over more than once": replace(good, journal=[*good.journal, good.journal[1]]),
        "closed 0 times": replace(good, journal=good.journal[:3]),
        "the books say": with_line(good, 3, counts=unbalanced),
        "holds the result of row": with_line(good, 1, results=swapped),
        "is said to be of": with_line(good, 1, results=strangers),
        "mixes attempts": with_line(good, 1, results=mixed),
        "without a reason of its own": replace(good, journal=[good.journal[0], failure, *good.journal[2:]]),
        "accepted more than once": replace(good, events=[*good.events, event("accepted", 0, "1")]),
        "ended more than once": replace(good, events=[*good.events, event("dead", 0)]),
        "published more than once": replace(good, events=[*good.events, event("published", 0)]),
        "was finished with 1 rows": replace(good, events=[*good.events[:2], event("finished", 0, "1")]),
        "was left behind": replace(good, keys=left),
        "rows [('b', 0)] were handed over more than once": replace(good, journal=[*good.journal, row, row]),
        "row 0 of batch b is another one in its group": replace(
            good, journal=[*good.journal, {**row, "result": result(plan, 0, call="d")}]
        ),
        "5 entries": replace(good, keys={"rolloutbus:{chaos}:groups:scored": ("stream", 900, 5)}),
    }


@pytest.mark.parametrize("words", broken())
def test_a_broken_promise_is_noticed(words: str) -> None:
    found = violations(broken()[words])
    assert any(words in violation for violation in found), found


def test_rows_that_came_one_by_one_and_once_violate_nothing() -> None:
    good = kept()
    rows = [{"kind": "row", "number": 0, "batch": "b", "row": at, "result": result(good.plan, at)} for at in range(4)]
    groups = [{**line, "origins": None} if line["kind"] == "group" else line for line in good.journal]
    assert violations(replace(good, journal=[groups[0], *rows, *groups[1:]])) == []


def test_a_group_that_ends_its_instances_may_fail_and_must_not_have_results() -> None:
    good = kept()
    rows = [{**row, "trouble": "kill"} if at < 2 else row for at, row in enumerate(good.plan.batches[0].rows)]
    poisoned = replace(good, plan=replace(good.plan, batches=(replace(good.plan.batches[0], rows=rows),)))
    failure = {"kind": "failure", "number": 0, "id": "b:0", "index": 0, "why": "InstanceDied: 3 instances"}
    assert violations(replace(poisoned, journal=[good.journal[0], failure, *good.journal[2:]])) == []
    assert any("has results although every attempt fails" in found for found in violations(poisoned))


def test_after_a_trainers_crash_a_group_may_come_twice_but_not_with_other_results() -> None:
    good = replace(kept(), trainer_crashed=True)
    assert violations(replace(good, journal=[*good.journal, good.journal[1]])) == []
    other = {**good.journal[1], "results": [result(good.plan, 0, call="e"), result(good.plan, 1, call="e")]}
    assert any("different results" in found for found in violations(replace(good, journal=[*good.journal, other])))

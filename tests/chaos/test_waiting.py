"""The verdict on waiting: each way of waiting in silence, made up in the evidence alone, is noticed, and what has a
reason is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.evidence import Evidence, Hold, Process, holds_of
from tests.chaos.spans import common, loaded, union, without
from tests.chaos.test_verdict import small_plan
from tests.chaos.verdict import violations
from tests.chaos.waiting import waited_too_long

GROUPS = 3


def evidence(
    first: Sequence[Hold], second: Sequence[Hold], *events: dict[str, str], room: int = 1 << 20, **words: Any
) -> Evidence:
    """Two instances with a slot each, up long before; groups are published at 0. What one holds to its end is done."""
    plan = small_plan()
    rows = [{**plan.batches[0].rows[0], "filler": 1000} for _ in range(2 * GROUPS)]
    plan = replace(
        plan,
        slots=1,
        trainer_delay_s=0.0,
        batches=(replace(plan.batches[0], rows=rows),),
        settings={**plan.settings, "max_unread_bytes": room},
    )
    holds = [*first, *second]
    taken = [
        event(
            hold.begin, "taken", hold.group, str(1 + sum(other.begin < hold.begin for other in of(hold.group, holds)))
        )
        | {"instance": "scored/0" if hold in first else "scored/1"}
        for hold in holds
        if hold.outcome != "parked"
    ]
    published = [event(0, "published", name) for name in {hold.group: 0 for hold in holds}]
    journal = [{"kind": "batch", "at": -1, "number": 0, "batch": "b"}]
    processes = [Process("scored/0", -9000, holds=first), Process("scored/1", -9000, holds=second)]
    ordered = sorted([*published, *taken, *events], key=lambda one: float(one["at"]))
    made = Evidence(plan, journal, ordered, {}, False, False, False, processes)
    return replace(made, **words)


def of(group: str, holds: Sequence[Hold]) -> list[Hold]:
    return [hold for hold in holds if hold.group == group]


def event(at: float, kind: str, group: str, attempt: str = "1", detail: str = "") -> dict[str, str]:
    batch, _, index = group.partition(":")
    return {
        "at": str(at), "kind": kind, "batch": batch, "group": index, "attempt": attempt, "instance": "-",
        "detail": detail,
    }  # fmt: skip


def held(group: int, begin: float, end: float, outcome: str = "done") -> Hold:
    return Hold(f"b:{group}", begin, end, outcome, claimed=begin > 100)


def gone(made: Evidence, at: float) -> Evidence:
    """The first instance died, and said nothing more of what it had."""
    return replace(made, processes=[replace(made.processes[0], gone=at), made.processes[1]])


def unheard(made: Evidence, begin: float, end: float) -> Evidence:
    """Both were paused."""
    return replace(
        made, processes=[replace(one, unable=[(begin, end)], unheard=[(begin, end)]) for one in made.processes]
    )


BUSY = held(2, 3, 9000)
RELEASED = [held(0, at, at + 5, "released") for at in range(5, 8000, 1900)]
WAITED = {
    "b:1 (fresh) was due": evidence([held(0, 4, 300)], [held(1, 1900, 2000)]),
    "b:0 (lost) was due for 2.20 s": gone(evidence([held(0, 4, 100, "")], [held(0, 3800, 3900)]), 100),
    "b:0 (retry) was due": evidence([held(0, 4, 50, "retry"), held(1, 60, 70)], [held(0, 2400, 2500)]),
    "b:0 (released) was due": evidence([held(0, 4, 50, "released")], [held(0, 2100, 2500)]),
    "b:0 (parked) was due": evidence([held(0, 4, 5, "parked"), held(0, 900, 1000)], []),
    "on shard scored groups that were due waited": evidence(RELEASED, [held(0, 9505, 9600)]),
    "took group b:1, a new one, while group b:0 (retry)": evidence(
        [held(0, 4, 50, "retry"), held(2, 50, 9000)],
        [held(0, 6000, 6100), Hold("b:1", 3000, 6000, "done"), Hold("b:2", 5, 3000, "lost")],
    ),
}
FAIR = {
    "taken at once": evidence([held(0, 4, 300)], [held(1, 5, 1600)]),
    "no slot is free": evidence([BUSY], [held(0, 4, 5000), held(1, 5001, 6000)]),
    "the lease ran until now": gone(evidence([held(0, 4, 4000, "")], [held(0, 5600, 5900)]), 4000),
    "sent to one that died": gone(evidence([held(0, 4, 500, "")], [held(1, 2100, 2200), held(0, 2201, 2300)]), 500),
    "not on the one that failed": evidence([held(0, 4, 50, "retry")], [held(2, 3, 4000), held(0, 4001, 4100)]),
    "no room": evidence(
        [held(1, 3, 9), held(0, 10, 11, "parked"), held(0, 3000, 3100)], [], event(9, "finished", "b:1", "1", "all"),
        room=2000, journal=[{"kind": "batch", "at": -1, "number": 0, "batch": "b"},
                            {"kind": "group", "at": 2990, "number": 0, "id": "b:1", "index": 1}],
    ),
    "paused": unheard(evidence([held(0, 4, 50, "released")], [held(0, 5000, 5100)]), 60, 2500),
    "a fault made all wait": evidence([held(0, 4, 300)], [held(1, 5000, 5100)], disturbed=[(-50, 2500)]),
    "nobody watched": replace(evidence([held(0, 4, 300)], [held(1, 5000, 5100)]), processes=[]),
    "in turn": evidence([held(0, 4, 50, "retry"), held(2, 51, 1900)], [held(1, 3, 1800), held(0, 1801, 1850)]),
}  # fmt: skip


def test_a_group_on_its_last_chance_waits_for_another_one_and_for_nothing_else() -> None:
    lost = [event(at, "lost", f"b:{group}") for group in (0, 2) for at in (1, 2)]
    holds = [held(2, 3, 4000), held(0, 4, 50, "suspect"), held(0, 4400, 4500)]
    both, one = (evidence(holds, [], *events) for events in (lost, lost[:2]))
    both, one = (
        replace(made, plan=replace(made.plan, slots=2, infra_attempts=3), processes=made.processes[:1])
        for made in (both, one)
    )
    assert list(waited_too_long(both)) == []
    assert any("b:0 (released) was due" in found for found in waited_too_long(one))


@pytest.mark.parametrize("words", WAITED)
def test_waiting_in_silence_is_noticed(words: str) -> None:
    found = list(waited_too_long(WAITED[words]))
    assert any(words in violation for violation in found), found


@pytest.mark.parametrize("reason", FAIR)
def test_waiting_for_a_reason_is_not(reason: str) -> None:
    assert list(waited_too_long(FAIR[reason])) == []


def test_the_whole_verdict_asks_for_it() -> None:
    assert any("b:1 (fresh) was due" in found for found in violations(WAITED["b:1 (fresh) was due"]))


def test_holds_are_what_a_process_told() -> None:
    told = [("claimed", "a", 1), ("held", "a", 2), ("held", "b", 3), ("ended", "a", 4), ("claimed", "c", 5)]
    lines = [{"kind": kind, "group": group, "at": at, "outcome": "done"} for kind, group, at in told]
    assert holds_of(lines, 9) == [
        Hold("a", 2, 4, "done", claimed=True),
        Hold("b", 3, 9, "", claimed=False),
        Hold("c", 5, 5, "", claimed=True),
    ]


def test_spans_add_up() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert common([(0, 5)], [(1, 2), (4, math.inf)]) == [(1, 2), (4, 5)]
    assert without([(0, 5)], [(-1, 1), (2, 3)]) == [(1, 2), (3, 5)]
    assert without([(0, 5)], []) == [(0, 5)]
    assert loaded([((0, 4), 10), ((2, 6), 10), ((3, 5), 5)], 20) == [(2, 4)]

"""What is known of a schedule when it is over, as plain values; all times are milliseconds of the host's clock, which
is also the broker's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.chaos.plan import Plan
from tests.chaos.spans import Span

Line = dict[str, Any]


@dataclass(frozen=True)
class Hold:
    """A group in a worker's hands, from before it was taken; `outcome` is empty where the process never said one.
    `claimed`: it was not read from the queue.
    """

    group: str
    begin: float
    end: float
    outcome: str
    claimed: bool = False


@dataclass(frozen=True)
class Process:
    """A worker process. `unable` are the spans in which it was given no chance to take anything, `unheard` those of
    them in which it could not renew either.
    """

    label: str
    up: float
    gone: float = math.inf
    unable: Sequence[Span] = ()
    unheard: Sequence[Span] = ()
    holds: Sequence[Hold] = ()


@dataclass(frozen=True)
class Evidence:
    """`events`: fields of the broker's record, in order, and `at`. `keys`: what is left, with type, TTL in ms and
    length. `processes`: the workers, none where nobody watched them. `disturbed`: when a fault made everything wait.
    """

    plan: Plan
    journal: Sequence[Line]
    events: Sequence[Mapping[str, str]]
    keys: Mapping[str, tuple[str, int, int]]
    trainer_crashed: bool
    trainer_gone: bool
    data_lost: bool
    processes: Sequence[Process] = ()
    disturbed: Sequence[Span] = ()


def holds_of(lines: Sequence[Line], gone: float) -> list[Hold]:
    """From what a process told, what it had in hand; what it had at its end it had until then. What was claimed and not
    begun with when it died counts for a moment: its lease runs from there.
    """
    began: dict[str, Hold] = {}
    claims: dict[str, float] = {}
    holds: list[Hold] = []
    for line in lines:
        group, at = line["group"], line["at"]
        if line["kind"] == "claimed":
            claims[group] = at
        elif line["kind"] == "held":
            began[group] = Hold(group, at, gone, "", claims.pop(group, None) is not None)
        else:
            holds.append(replace(began.pop(group), end=at, outcome=line["outcome"]))
    lost = [Hold(group, at, at, "", claimed=True) for group, at in claims.items()]
    return [*holds, *began.values(), *lost]

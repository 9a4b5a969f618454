"""Whether anything waited in silence: pure functions over what the workers told and what the broker noted.

A group is due from its publication to its end, but for the time that it is in somebody's hands, that a dead or unheard
holder's lease still runs, or that it is meant to wait. It is idle while it is due and an instance could have taken it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from tests.chaos.evidence import Evidence, Hold, Process
from tests.chaos.plan import LEASE_S
from tests.chaos.spans import Span, common, loaded, union, without
from tests.chaos.stage import WORKER_SETTINGS

LEASE_MS = LEASE_S * 1000
# After a fault: connections time out, everybody comes back, and has watched the broker for a lease again.
GRACE_MS = 2 * LEASE_MS
STARTING_MS = 1000
# A group on its last chance that gave way to another one.
SUSPECT_MS = 500
# Until an instance's record expires and its peer knows that it is alone, and a look after that.
ALONE_MS = 2000
# More than a row's result takes besides its filler.
ROW_BYTES = 300
KINDS = {"parked": "parked", "retry": "retry", "released": "released", "suspect": "released"}
AGAIN = ("retry", "released", "lost")
# What the product promises is: at once for what was never taken, 50 ms for what was put aside, else a look each second.
# The rest is for a machine that does much else.
LONGEST_MS = {"fresh": 1500, "parked": 800, "retry": 2000, "released": 2000, "lost": 2000}
SUM_MS = 6000
LATE_MS = 2000


class Wait(NamedTuple):
    """When a group was due between two holders. `failed_on` are labels that leave it to a peer, the last one last."""

    group: str
    shard: str
    kind: str
    due: Sequence[Span]
    failed_on: Sequence[str] = ()


class Idle(NamedTuple):
    """When it was due and could have been taken."""

    wait: Wait
    spans: Sequence[Span]

    @property
    def longest(self) -> float:
        return max((end - begin for begin, end in self.spans), default=0.0)


class Late(NamedTuple):
    """A group was read from the queue by `label`, `ms` after another one there was due again."""

    label: str
    group: str
    wait: Wait
    ms: float


def waited_too_long(evidence: Evidence) -> Iterator[str]:
    """All violations; none where nobody watched the workers."""
    if evidence.processes:
        yield from _too_long(Waiting(evidence))


def _too_long(waiting: Waiting) -> Iterator[str]:
    for kind, most in LONGEST_MS.items():
        worst = max((at for at in waiting.idle if at.wait.kind == kind), key=lambda at: at.longest, default=None)
        if worst is not None and worst.longest > most:
            yield f"group {worst.wait.group} ({kind}) was due for {_s(worst.longest)} beside a free slot"
    for shard, total in waiting.totals.items():
        if total > SUM_MS:
            yield f"on shard {shard} groups that were due waited beside a free slot for {_s(total)} in all"
    worst = max(waiting.late, key=lambda late: late.ms, default=None)
    if worst is not None and worst.ms > LATE_MS:
        yield (
            f"{worst.label} took group {worst.group}, a new one, while group {worst.wait.group} ({worst.wait.kind}) "
            f"had been due for {_s(worst.ms)}"
        )


def _s(ms: float) -> str:
    return f"{ms / 1000:.2f} s"


class Waiting:
    """What of `evidence` the verdict on waiting needs, each part computed once."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._plan = evidence.plan
        self._disturbed = [(begin, end + GRACE_MS) for begin, end in evidence.disturbed]
        self._numbers = {
            line["batch"]: int(line["number"]) for line in evidence.journal if line["kind"] in ("batch", "resumed")
        }

    @cached_property
    def idle(self) -> list[Idle]:
        return [Idle(wait, self._judged(wait.due, self._free(wait))) for wait in self.waits]

    @cached_property
    def totals(self) -> dict[str, float]:
        """Per shard, the time in which anything was idle."""
        return {
            shard.name: sum(
                end - begin
                for begin, end in union(span for at in self.idle if at.wait.shard == shard.name for span in at.spans)
            )
            for shard in self._plan.shards
        }

    @cached_property
    def late(self) -> list[Late]:
        """All groups that came from the queue while another one was due again."""
        again = [wait for wait in self.waits if wait.kind in AGAIN]
        return [late for wait in again for taker in self._on(wait.shard) for late in self._overtaken(wait, taker)]

    def _overtaken(self, wait: Wait, taker: Process) -> Iterator[Late]:
        could = self._judged(wait.due, self._able(taker, wait))
        for hold in taker.holds:
            if hold.claimed or hold.outcome == "parked":
                continue
            for begin, end in could:
                if begin <= hold.begin < end:
                    yield Late(taker.label, hold.group, wait, hold.begin - begin)

    def _judged(self, due: Iterable[Span], able: Iterable[Span]) -> list[Span]:
        return without(common(due, able), self._disturbed)

    def _on(self, shard: str) -> list[Process]:
        return [process for process in self._evidence.processes if self._plan.shard(process.label).name == shard]

    def _free(self, wait: Wait) -> list[Span]:
        """When an instance could have taken it at once."""
        able = [(process, self._able(process, wait)) for process in self._on(wait.shard)]
        return union(span for process, spans in able for span in without(spans, self._full(process)))

    def _able(self, process: Process, wait: Wait) -> list[Span]:
        kept = [(since, until + GRACE_MS) for since, until in process.unable]
        if process.label in wait.failed_on:
            others = {peer.label for peer in self._on(wait.shard)} - {process.label}
            heirs = others if process.label == wait.failed_on[-1] else others.difference(wait.failed_on)
            kept += [(peer.up, peer.gone + ALONE_MS) for peer in self._on(wait.shard) if peer.label in heirs]
        if self._last_chance(wait.group, min((begin for begin, _ in wait.due), default=0.0)):
            kept += self._with_another(process.label)
        return without([(process.up + STARTING_MS, process.gone)], kept)

    def _last_chance(self, group: str, at: float) -> bool:
        """Whether one more loss would be its last then, so that it runs beside no other such group."""
        return self._last_chances.get(group, math.inf) <= at

    @cached_property
    def _last_chances(self) -> dict[str, float]:
        losses: dict[str, list[float]] = {}
        for event in self._evidence.events:
            if event["kind"] == "lost":
                losses.setdefault(f"{event['batch']}:{event['group']}", []).append(float(event["at"]))
        most = self._plan.infra_attempts - 1
        return {group: times[most - 1] for group, times in losses.items() if len(times) >= most}

    def _with_another(self, label: str) -> list[Span]:
        """While an instance has a group on its last chance, and after its death until that one is taken over."""
        return [
            (hold.begin, hold.end + SUSPECT_MS + (GRACE_MS if hold.outcome in ("", "error") else 0))
            for process in self._evidence.processes
            if process.label == label
            for hold in process.holds
            if self._last_chance(hold.group, hold.end)
        ]

    def _full(self, process: Process) -> list[Span]:
        return loaded((((hold.begin, hold.end), 1) for hold in process.holds), self._plan.slots)

    @cached_property
    def waits(self) -> list[Wait]:
        holds: dict[str, list[tuple[Process, Hold]]] = {}
        for process in self._evidence.processes:
            for hold in process.holds:
                holds.setdefault(hold.group, []).append((process, hold))
        ends = self._ends()
        lives = {
            group: (at, ends.get(group, math.inf))
            for group, at in self._times("published").items()
            if group.split(":")[0] in self._numbers
        }
        return [wait for group, life in lives.items() for wait in self._waits(group, life, holds.get(group, []))]

    def _waits(self, group: str, life: Span, holds: Sequence[tuple[Process, Hold]]) -> Iterator[Wait]:
        for gap in without([life], (span for process, hold in holds for span in _covered(process, hold))):
            before = [(hold.end, process.label, hold.outcome) for process, hold in holds if hold.begin <= gap[0]]
            _, _, outcome = max(before, default=(0, "", "fresh"))
            claimed = any(hold.claimed and hold.begin == gap[1] for _, hold in holds)
            if outcome == "fresh" and claimed and (died := self._died(self._shard(group), gap)):
                gap, outcome = (died, gap[1]), "lost"
            kind = outcome if outcome == "fresh" else KINDS.get(outcome, "lost")
            due = without([gap], self._meant_to_wait(group, gap, outcome))
            yield Wait(group, self._shard(group), kind, due, _failed_on(before) if kind == "retry" else ())

    def _died(self, shard: str, gap: Span) -> float:
        """When the lease ended of a process that the group may have been sent to just when it went or was cut off."""
        sent = [process.gone for process in self._on(shard)]
        sent += [max(begin, gap[0]) for process in self._on(shard) for begin, end in process.unheard if end > gap[0]]
        return max((at + LEASE_MS for at in sent if gap[0] <= at + LEASE_MS <= gap[1]), default=0.0)

    def _meant_to_wait(self, group: str, gap: Span, outcome: str) -> list[Span]:
        if outcome == "retry":
            return [(gap[0], gap[0] + self._retry_ms(group, gap[0]))]
        if outcome == "suspect":
            return [(gap[0], gap[0] + SUSPECT_MS)]
        return self._no_room(group.split(":")[0]) if outcome == "parked" else []

    def _retry_ms(self, group: str, now: float) -> float:
        """The longest delay that the policy may have chosen."""
        failed = [event for event in self._of(group, "retry", "lost") if float(event["at"]) <= now]
        return WORKER_SETTINGS["retry_backoff_s"] * 1000 * 2 ** max(0, len(failed) - 1)

    def _of(self, group: str, *kinds: str) -> list[Mapping[str, str]]:
        return [
            event
            for event in self._evidence.events
            if event["kind"] in kinds and f"{event['batch']}:{event['group']}" == group
        ]

    def _times(self, *kinds: str) -> dict[str, float]:
        """When the first of such events was noted of each group."""
        events = [event for event in self._evidence.events if event["kind"] in kinds]
        return {f"{event['batch']}:{event['group']}": float(event["at"]) for event in reversed(events)}

    def _ends(self) -> dict[str, float]:
        """By the broker's record, a worker's word, or with the batch."""
        over = {line["batch"]: line["at"] for line in self._evidence.journal if line["kind"] in ("closed", "unknown")}
        ends = [
            *self._times("finished", "dead", "abandoned").items(),
            *((group, over[group.split(":")[0]]) for group in self._times("published") if group.split(":")[0] in over),
            *(
                (hold.group, hold.end)
                for process in self._evidence.processes
                for hold in process.holds
                if hold.outcome in ("done", "gone", "dead")
            ),
        ]
        return {group: min(at for _, at in times) for group, times in itertools.groupby(sorted(ends), lambda at: at[0])}

    def _shard(self, group: str) -> str:
        batch, index = group.split(":")
        planned = self._plan.batches[self._numbers[batch]]
        return planned.rows[int(index) * planned.size]["agent_ref"]["name"]

    def _no_room(self, batch: str) -> list[Span]:
        """When as much was unread as may be, by the sizes of rows that the trainer did not have."""
        planned = self._plan.batches[self._numbers[batch]]
        row_bytes = planned.rows[0]["filler"] + ROW_BYTES
        read = {line["id"]: line["at"] for line in self._evidence.journal if line["kind"] in ("group", "failure")}
        # It asks for the next one, and so says that it has this one, after its delay.
        delay = self._plan.trainer_delay_s * 1000
        loads: list[tuple[Span, int]] = []
        for event in self._evidence.events:
            if event["batch"] == batch and event["kind"] in ("accepted", "finished"):
                rows = planned.size if event["detail"] == "all" else event["detail"].count(",") + 1
                until = read.get(f"{batch}:{event['group']}", math.inf) + delay
                loads.append(((float(event["at"]), until), rows * row_bytes))
        return loaded(loads, self._plan.settings.get("max_unread_bytes", 1 << 28))


def _failed_on(holds: Iterable[tuple[float, str, str]]) -> list[str]:
    """The labels on which a group failed, of its holds as (end, label, outcome); the last one last."""
    failed = [label for _, label, outcome in sorted(holds, reverse=True) if outcome == "retry"]
    return list(dict.fromkeys(failed))[::-1]


def _covered(process: Process, hold: Hold) -> list[Span]:
    """While the group was the holder's, up to the end of its lease where the holder gave no word or went unheard."""
    end = hold.end + (LEASE_MS if hold.outcome in ("", "error") else 0)
    expired = [(begin + LEASE_MS, until) for begin, until in process.unheard]
    return without([(hold.begin, end)], expired)

"""The table of a run: fault, schedules, violations, and how long until the trainer got on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tests.chaos.schedule import Outcome

HEADER = "| fault | schedules | fault struck | violations | recovery median | recovery max |\n|---|---|---|---|---|---|"


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, one line per fault in first-seen order, and a sum."""
    faults = list(dict.fromkeys(sorted(outcome.plan.fault for outcome in outcomes)))
    lines = [_line(fault, [outcome for outcome in outcomes if outcome.plan.fault == fault]) for fault in faults]
    return "\n".join([HEADER, *lines, _line("**all**", outcomes)])


class Judged(Protocol):
    """The outcome of a schedule of either driver."""

    @property
    def violations(self) -> list[str]: ...


def conclude(text: str, outcomes: Sequence[Judged], seed: int, report: Path | None) -> int:
    """Print the table, write it to `report` too where that is given; the exit code, 0 when nothing was violated."""
    print(text)
    if report:
        report.write_text(f"{len(outcomes)} schedules from seed {seed}\n\n{text}\n", encoding="utf-8")
    return int(any(outcome.violations for outcome in outcomes))


def _line(name: str, outcomes: Sequence[Outcome]) -> str:
    times = [seconds for outcome in outcomes for seconds in outcome.recoveries]
    median, longest = (f"{statistics.median(times):.2f} s", f"{max(times):.2f} s") if times else ("–", "–")
    struck = sum(outcome.struck for outcome in outcomes)
    violated = sum(len(outcome.violations) for outcome in outcomes)
    return f"| {name} | {len(outcomes)} | {struck} | {violated} | {median} | {longest} |"


def summary(outcome: Outcome) -> str:
    """One schedule on one line, with what replays it where something is wrong."""
    plan = outcome.plan
    shards = "+".join(f"{shard.name}×{shard.replicas}" for shard in plan.shards)
    groups = sum(batch.groups for batch in plan.batches)
    what = f"{plan.fault:18} seed {plan.seed}: {outcome.seconds:5.1f} s, {groups} groups on {shards}"
    times = ", ".join(f"{seconds:.2f}" for seconds in outcome.recoveries) or "not struck"
    if not outcome.violations:
        return f"ok   {what}, recovery {times}"
    wrong = "\n".join(f"    {violation}" for violation in outcome.violations)
    replay = f"    replay: python -m tests.chaos --only {plan.fault} --seed {plan.seed} --schedules 1"
    return f"FAIL {what}\n{wrong}\n{replay}\n{outcome.account}"

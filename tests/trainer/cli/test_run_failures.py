"""Groups that fail under `run`, on an instance in a thread: what is counted, written and said of them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.errors import GroupFailedError, RouteError
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.collector import GroupFailure
from rolloutbus.trainer.cli import run_summary
from rolloutbus.trainer.cli.console import PlainConsole
from rolloutbus.trainer.cli.rows import FileRows
from rolloutbus.trainer.cli.run_command import Job, told_at_the_end, work
from rolloutbus.trainer.cli.run_summary import RouteTally, Summary, reasons, show, verdict

from .conftest import ROUTE, RUN, SHARD, Stage, rows_of


def job_of(stage: Stage, *deeds: str, **options: Any) -> Job:
    rows = rows_of(*deeds)
    found = FileRows("rows.jsonl", rows, [1 + row // 2 for row in range(len(rows))])
    return Job(BrokerSettings(url=stage.url), RUN, {ROUTE: SHARD}, found, 2, **options)


def test_a_row_that_only_the_running_fleet_refuses_is_named_by_its_line(stage: Stage, tmp_path: Path) -> None:
    """It was row 2, of rows that the command had made of two lines."""
    job = job_of(stage, "ok", "ok", on_failure="yield")
    for row in job.found.rows[2:]:
        row["agent_ref"] = {"name": "chess"}
    with pytest.raises(RouteError, match=r"^rows\.jsonl line 2: no shard hosts the route 'chess'"):
        asyncio.run(work(job, str(tmp_path / "o.jsonl")))


@pytest.mark.parametrize("broker_stays", [True, False])
def test_the_group_that_ends_the_job_is_counted_and_written(stage: Stage, tmp_path: Path, broker_stays: bool) -> None:
    """`--on-failure raise` told of 0 failed groups, and advised what only Python takes."""
    stage.instance()
    job = job_of(stage, "ok", "fail", on_failure="raise", broker_stays=broker_stays)
    with pytest.raises(GroupFailedError, match=r"^rows\.jsonl line 2: group 1 \(rows 2 to 3\) failed for") as told:
        asyncio.run(work(job, str(tmp_path / "o.jsonl")))
    assert "--on-failure yield" in str(told.value)
    assert "on_failure=" not in str(told.value)
    assert (f"dead list --run {RUN}" in str(told.value)) == broker_stays
    assert (job.summary.failed, job.summary.routes[ROUTE].failures) == (1, 2)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [line["_rowidx"] for line in lines if "failure" in line] == [2, 3]


def failure_of(group: int, message: str) -> GroupFailure:
    return GroupFailure(f"b:{group}", group, [2 * group, 2 * group + 1], "data", "ValueError", message, "", "math", 1)


def test_groups_that_failed_alike_are_one_line_and_no_group_is_forgotten() -> None:
    """Of ten failed groups three were named, all with the same words, and the rest was not mentioned."""
    summary = Summary()
    for group, message in enumerate(["odd", "bad", "bad", "worse", "mad", "sad"]):
        summary.add(failure_of(group, message), "reverse")
    assert list(reasons(summary)) == [
        "2 groups of reverse: ValueError: bad",
        "group 0 (reverse): ValueError: odd",
        "group 3 (reverse): ValueError: worse",
        "and 2 more failed for other reasons, which the results tell",
    ]


def test_failures_that_differ_by_numbers_are_one_reason() -> None:
    """Ten groups without a reward were three lines and "7 more failed for other reasons"."""
    summary = Summary()
    for group in range(10):
        summary.add(failure_of(group, f"no reward for row {2 * group}"), "reverse")
    assert list(reasons(summary)) == ["10 groups of reverse, such as group 0: ValueError: no reward for row 0"]


def test_an_instance_that_completed_none_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary(groups=1, labels=["math/0", "math/1"], metrics={"timing/rollout/routing/groups/math/0": 1.0})
    show(summary, console=PlainConsole())
    assert re.search(r"math/0 +1 +0\.00s", shown := capsys.readouterr().out)
    assert re.search(r"math/1 +0 +- +-", shown)


def test_one_of_anything_is_told_as_one() -> None:
    summary = Summary(groups=1, completed=1, metrics={"timing/rollout/retries": 1.0})
    assert verdict(summary) == "1 group = 1 completed + 0 failed + 0 cancelled; 0 rows in 0.00s (1 retry)"


@pytest.mark.parametrize("rewards", [[math.inf, -math.inf], [1e308, 1e308]])
def test_rewards_without_a_mean_are_told_as_that(rewards: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The summary, and the job's own error with it, was lost to the stack of a `ValueError`."""
    summary = Summary(groups=1, routes={ROUTE: RouteTally(rows=2, rewards=rewards)})
    with told_at_the_end(summary, as_json=False, results="o.jsonl"):
        pass
    assert re.search(rf"{ROUTE} +2 +nan", capsys.readouterr().out)
    assert summary.as_plain()["routes"][ROUTE]["mean_reward"] is None


def test_a_summary_that_cannot_be_told_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("of the summary")

    monkeypatch.setattr(run_summary, "show", fail)
    with pytest.raises(KeyboardInterrupt), told_at_the_end(Summary(groups=1), as_json=False, results="o.jsonl"):
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError), told_at_the_end(Summary(groups=1), as_json=False, results="o.jsonl"):
        pass

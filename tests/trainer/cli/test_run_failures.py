"""Groups that fail under `run`, on an instance in a thread: what is counted, written and said of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.errors import GroupFailedError
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.trainer.cli.run_command import Job, work

from .conftest import ROUTE, RUN, SHARD, Stage, rows_of


def job_of(stage: Stage, *deeds: str, **options: Any) -> Job:
    return Job(BrokerSettings(url=stage.url), RUN, {ROUTE: SHARD}, rows_of(*deeds), 2, **options)


@pytest.mark.parametrize("broker_stays", [True, False])
def test_the_group_that_ends_the_job_is_counted_and_written(stage: Stage, tmp_path: Path, broker_stays: bool) -> None:
    """`--on-failure raise` told of 0 failed groups, and advised what only Python takes."""
    stage.instance()
    job = job_of(stage, "ok", "fail", on_failure="raise", broker_stays=broker_stays)
    with pytest.raises(GroupFailedError, match=r"group 1 \(rows 2 to 3\) failed for good on math") as told:
        asyncio.run(work(job, str(tmp_path / "o.jsonl")))
    assert "--on-failure yield" in str(told.value)
    assert "on_failure=" not in str(told.value)
    assert (f"dead list --run {RUN}" in str(told.value)) == broker_stays
    assert (job.summary.failed, job.summary.routes[ROUTE].failures) == (1, 2)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [line["_rowidx"] for line in lines if "failure" in line] == [2, 3]

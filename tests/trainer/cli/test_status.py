"""`status` and `cancel` against a batch that stands still."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import BatchCancelledError

from .conftest import ROUTE, RUN, SHARD, Stage, call, comes_true, rows_of, take


def test_status_counts_what_is_queued_running_and_done(stage: Stage) -> None:
    stage.instance(slots=2)
    batch = stage.batch(rows_of("ok", "wait", "wait", "ok", "ok"))
    stage.sealed(batch)
    take(batch, 1)
    comes_true(lambda: stage.status(batch, 1) == stage.status(batch, 2) == "running")
    run = call("status", "--json").json["runs"][0]
    shard, seen = run["shards"][0], run["batches"][0]
    assert (run["run"], run["fleet"]) == (RUN, False)
    assert (shard["shard"], shard["queued"], shard["running"], shard["unfinished"]) == (SHARD, 2, 2, 4)
    assert 0 <= shard["oldest_age_s"] < 20
    assert [instance["label"] for instance in shard["instances"]] == [SHARD]
    assert (seen["batch"], seen["client"], seen["completed"], seen["failed"]) == (batch.id, "trainer", 1, 0)
    assert seen["statuses"]["running"] == 2
    assert seen["client_seen_s"] < 20


def test_status_table_fits_80_columns_and_names_shard_and_batch(stage: Stage) -> None:
    stage.instance()
    batch = stage.batch(rows_of("wait", "wait", "wait"))
    comes_true(lambda: stage.status(batch, 1) == "running")
    shown = call("status", "--run", RUN).out
    assert "1 open batch, 0 dead letters" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert SHARD in shown
    assert batch.id in shown


def test_status_tells_no_secret(stage: Stage) -> None:
    stage.instance()
    batch = stage.batch(rows_of("wait"))
    comes_true(lambda: stage.status(batch, 0) == "running")
    secrets = [str(stage.redis.hget(stage.keys.batch(batch.id), "g:0")).split()[2]]
    secrets.append(str(stage.redis.hget(stage.keys.instance(SHARD), "incarnation")))
    secrets.append(str(stage.redis.get(stage.keys.owner("trainer"))).split()[0])
    shown = call("status", "--json").out
    assert not [secret for secret in secrets if secret in shown]


def test_status_of_an_empty_broker_says_so(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", broker.url)
    assert "no run on this broker; start one with `rolloutbus up`" in " ".join(call("status").out.split())
    assert call("status", "--json").json == {"runs": []}


def documents(lines: Iterable[str]) -> Any:
    """The next JSON document, whose last line is a brace of its own."""
    return json.loads("".join(itertools.takewhile(lambda line: line != "}\n", lines)) + "}")


def test_watching_looks_again_and_outlasts_a_restart_of_the_broker(stage: Stage, broker: EmbeddedBroker) -> None:
    command = [sys.executable, "-m", "rolloutbus.trainer.cli", "status", "--watch", "0.2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        try:
            assert [documents(watching.stdout)["runs"][0]["run"] for _ in range(2)] == [RUN, RUN]
            broker.kill()
            assert "reach the broker" in watching.stderr.readline()
            broker.restart()
            documents(watching.stdout)
        finally:
            watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130


def test_watching_a_run_outlasts_a_broker_that_has_forgotten_it(stage: Stage) -> None:
    command = [sys.executable, "-m", "rolloutbus.trainer.cli", "status", "--run", RUN, "--watch", "0.2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        try:
            shown = watching.stdout
            documents(shown)
            stage.redis.flushall()
            assert "there is no run" in watching.stderr.readline()
            stage.redis.hset(stage.keys.routes, ROUTE, SHARD)
            comes_true(lambda: documents(shown)["runs"][0]["run"] == RUN)
        finally:
            watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300"])
def test_watching_without_end_between_two_looks_is_refused(seconds: str) -> None:
    assert "--watch" in call("status", "--watch", seconds, code=2).said


def test_what_cannot_be_watched_from_the_start_is_an_error() -> None:
    said = call("status", "--broker-url", "redis://127.0.0.1:1/0", "--watch", "1", code=1)
    assert "cannot reach the broker" in said.err


def test_unknown_run_lists_those_there_are(stage: Stage) -> None:
    assert f"there are: {RUN}" in call("status", "--run", "exp2", code=2).said


def test_unreachable_broker_is_one_line_and_no_stack() -> None:
    said = call("status", "--broker-url", "redis://:secret@127.0.0.1:1/0", code=1)
    assert "cannot reach the broker" in said.err
    assert "secret" not in said.err
    assert "Traceback" not in said.err


def test_cancel_ends_the_batch_and_tells_its_client(stage: Stage) -> None:
    stage.instance(slots=1)
    batch = stage.batch(rows_of("wait", "wait", "wait"))
    stage.sealed(batch)
    comes_true(lambda: stage.status(batch, 0) == "running")
    assert call("cancel", batch.id, "--reason", "wrong checkpoint", "--json").json["cancelled_groups"] == 3
    with pytest.raises(BatchCancelledError, match="wrong checkpoint"):
        take(batch, 1)
    asyncio.run(batch.cancel())
    comes_true(lambda: stage.redis.xlen(stage.keys.groups(SHARD)) == 0)


def hung(stage: Stage, *, since_s: float, instance: str = SHARD, **of_shard: Any) -> None:
    """A group of eight rows, three of them in, that was first taken so long ago."""
    taken_ms = int((time.time() - since_s) * 1000)
    record = f"running 2 token {instance} 1-0 1 0 3 9 {taken_ms}"
    stage.redis.hset(stage.keys.shards, SHARD, json.dumps({"replicas": 1, "group_timeout_s": 3600, **of_shard}))
    fields = {"client": "c", "state": "sealed", "groups": "9", "group_size": "8", "g:7": record}
    stage.redis.hset(stage.keys.batch("4f1c0a9be210"), mapping=fields)


def line_of(shown: str, beginning: str) -> list[str]:
    return next(line.split() for line in shown.splitlines() if line.startswith(beginning))


def test_the_longest_running_group_stands_there_with_holder_rows_and_deadline(stage: Stage) -> None:
    """A hung environment was to be seen in nothing but a number that did not change."""
    stage.instance()
    hung(stage, since_s=2850)
    shown = call("status", "--run", RUN).out
    assert "longest-running group of each shard" in shown
    batch, group, instance, attempt, rows_in, since, running, left = line_of(shown, "4f1c0a9be210")
    assert (batch, group, instance, attempt, rows_in) == ("4f1c0a9be210", "7", SHARD, "2", "3/8")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", since)
    assert re.fullmatch(r"47m3\ds|47m4\ds", running)
    assert re.fullmatch(r"12m[12]\ds", left)
    assert max(map(len, shown.splitlines())) <= 80
    longest = call("status", "--json").json["runs"][0]["shards"][0]["longest"]
    assert (longest["batch"], longest["group"], longest["accepted_rows"], longest["rows"]) == (batch, 7, 3, 8)
    assert longest["instance_alive"]


def test_a_holder_that_is_gone_and_time_that_is_over_are_said(stage: Stage) -> None:
    hung(stage, since_s=4000, instance=f"{SHARD}/12", commit="group")
    words = line_of(call("status").out, "4f1c0a9be210")
    # None of the rows of such a shard is in before all are.
    assert words[3:6] == ["(gone)", "2", "-"]
    assert words[-1] == "over"


def test_where_nothing_runs_no_group_is_the_longest(stage: Stage) -> None:
    assert "longest-running" not in call("status").out
    assert call("status", "--json").json["runs"][0]["shards"][0]["longest"] is None


def test_a_cancelled_batch_that_its_client_has_not_closed_is_not_open(stage: Stage) -> None:
    """It was counted as open, and its groups as running."""
    stage.instance(slots=1)
    batch = stage.batch(rows_of("wait", "wait"))
    stage.sealed(batch)
    comes_true(lambda: stage.status(batch, 0) == "running")
    kept = stage.redis.hgetall(stage.keys.batch(batch.id))
    call("cancel", batch.id, "--reason", "wrong checkpoint")
    asyncio.run(batch.cancel())
    # As it stands for as long as its client does not come: stopped, or gone.
    stage.redis.hset(
        stage.keys.batch("left"), mapping={**kept, "state": "closed", "reason": "wrong checkpoint", "cancelled": "2"}
    )
    shown = call("status").out
    assert "0 open batches, 1 closed" in shown
    assert line_of(shown, "left")[2:8] == ["closed", "2", "0", "0", "-", "-"]
    assert "batch left: cancelled (wrong checkpoint), 2 groups; its client" in " ".join(shown.split())
    assert "longest-running" not in shown


def test_cancelling_twice_says_that_it_was_cancelled_before(stage: Stage) -> None:
    record = {"client": "c", "state": "closed", "reason": "enough", "groups": "1"}
    stage.redis.hset(stage.keys.batch("left"), mapping=record)
    assert "batch left: was cancelled before" in call("cancel", "left", "--reason", "again").out
    told = call("cancel", "left", "--json").json
    assert told == {"batch": "left", "cancelled_groups": 0, "was_cancelled_before": True}
    assert stage.redis.hget(stage.keys.batch("left"), "reason") == "enough"


def test_cancelling_what_is_not_there_is_an_error(stage: Stage) -> None:
    assert "no open batch 'nope'" in call("cancel", "nope", code=1).said


def test_a_batch_whose_record_lacks_its_shards_can_be_cancelled(stage: Stage) -> None:
    """It was a stack, and `status` shows such a batch."""
    stage.redis.hset(stage.keys.batch("odd"), mapping={"client": "c", "state": "open", "groups": "1"})
    assert call("cancel", "odd", "--run", RUN).out == "batch odd: 0 groups cancelled\n"
    assert stage.redis.hget(stage.keys.batch("odd"), "state") == "closed"

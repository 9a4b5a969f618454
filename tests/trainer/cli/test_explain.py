"""`explain`: a group's life, also when it is over and when its beginning is gone."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from rolloutbus.broker.group_life import GroupEvent, GroupLife, GroupRecord
from rolloutbus.trainer.cli.explain_command import headline

from .conftest import SHARD, Stage, call, comes_true, rows_of, take


def test_a_running_group_shows_its_holder_and_its_lease(stage: Stage) -> None:
    stage.instance()
    batch = stage.batch(rows_of("wait"))
    comes_true(lambda: stage.status(batch, 0) == "running")
    life = call("explain", batch.id, "0", "--json").json
    assert [event["kind"] for event in life["events"]] == ["published", "taken"]
    assert life["events"][1]["instance"] == SHARD
    assert life["record"]["status"] == "running"
    assert life["record"]["idle_s"] < 20
    assert life["attempt_since_ms"] == life["events"][1]["at_ms"]
    assert life["deadline_ms"] == life["record"]["first_take_ms"] + 3_600_000
    assert (life["rows"], life["shard"], life["group_timeout_s"]) == (2, SHARD, 3600)
    shown = call("explain", batch.id, "0").out
    assert "lease renewed" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_finished_batch_is_explained_from_its_events(stage: Stage) -> None:
    stage.instance()
    batch = stage.batch(rows_of("ok"))
    take(batch, 1)
    asyncio.run(batch.cancel())
    life = call("explain", batch.id, "0", "--json").json
    assert life["record"] is None
    assert [event["kind"] for event in life["events"]] == ["published", "taken", "finished"]
    assert "the batch is over" in call("explain", batch.id, "0").out


def test_a_dead_group_shows_failure_and_traceback(stage: Stage) -> None:
    stage.instance()
    batch = stage.batch(rows_of("fail"))
    take(batch, 1)
    shown = call("explain", batch.id, "0").out
    assert "failed for good" in shown
    assert "ValueError: no number in [the] answer" in shown
    assert "Traceback" in shown


def test_a_lease_that_is_over_may_have_been_given_free(stage: Stage) -> None:
    """It was said to have expired also where the fleet had seen its process die and had given it free at once."""
    detail = "lease expired; taken over by math/1"
    event = {"kind": "lost", "batch": "b", "group": "0", "attempt": "1", "instance": "math/0", "detail": detail}
    stage.redis.xadd(stage.keys.events, event)
    shown = call("explain", "b", "0")
    words = " ".join(shown.out.split())
    assert "lease over" in words
    assert "run out, or its instance died; taken over by math/1" in words


def test_trimmed_events_are_said_to_be_missing(stage: Stage) -> None:
    stage.instance()
    batch = stage.batch(rows_of("wait"))
    comes_true(lambda: stage.status(batch, 0) == "running")
    stage.redis.xtrim(stage.keys.events, maxlen=1, approximate=False)
    assert "its first events were trimmed" in " ".join(call("explain", batch.id, "0").out.split())
    assert call("explain", batch.id, "0", "--json").json["trimmed"]


def test_a_group_that_never_was_is_an_error(stage: Stage) -> None:
    assert "nothing is known of group 7" in call("explain", "nope", "7", code=1).said


def test_the_headline_of_a_lapsed_lease_says_that_anybody_may_take_over() -> None:
    record = GroupRecord("running", 2, "math/0", "1-0", 1, 0, 3, 1_000, idle_s=31.0)
    event = GroupEvent(1_000, "published", 0, "-", "")
    said = " ".join(headline(GroupLife("b", 0, 40_000, (event,), record, "sealed", None, False, 1_000)))
    assert "has run out, anybody may take it over" in said
    assert "1 infra" in said


def life_of(record: GroupRecord, *events: GroupEvent, now_s: float = 2850.0, **more: object) -> GroupLife:
    """A group of eight rows that was first taken at the beginning of time, of a shard that gives it an hour."""
    life = GroupLife("b", 0, int(now_s * 1000), events, record, "sealed", None, False, 0)
    known: dict[str, Any] = {"rows": 8, "shard": SHARD, "commit": "row", "group_timeout_s": 3600.0, **more}
    return dataclasses.replace(life, deadline_ms=3_600_001, **known)


def test_a_group_that_hangs_shows_since_when_what_came_and_its_deadline() -> None:
    record = GroupRecord("running", 1, "math/0", "1-0", 0, 0, 3, 1, idle_s=0.5)
    said = list(headline(life_of(record, GroupEvent(30_000, "accepted", 1, "math/0", "0,1,2"))))
    assert said == [
        "group 0 of batch b (sealed): running on math/0, attempt 1",
        "3 of 8 rows accepted, the last 47m00s ago",
        "running for 47m29s, since 00:00:00 UTC",
        "deadline in 12m30s, at 01:00:00 UTC: group_timeout_s (3600 s) from first take",
        "lease renewed 0.50s ago, ends in 29.5s unless renewed (lease_s at its default)",
    ]
    assert max(map(len, said)) <= 80


def test_a_later_attempt_shows_its_own_start_and_the_first_take() -> None:
    record = GroupRecord("running", 2, "math/0", "1-0", 1, 0, 0, 1)
    said = list(headline(life_of(record, attempt_since_ms=2_790_000)))
    assert "running for 1m00s, since 00:46:30 UTC" in said
    assert "first taken 47m29s ago, at 00:00:00 UTC" in said
    waiting = list(headline(life_of(dataclasses.replace(record, status="delayed"), now_s=3700.0)))
    assert "deadline passed 1m39s ago, at 01:00:00 UTC: group_timeout_s (3600 s) from first take" in waiting
    assert not [line for line in waiting if line.startswith("running")]


def test_no_row_accepted_is_no_bad_sign_where_all_are_accepted_at_once() -> None:
    record = GroupRecord("running", 1, "math/0", "1-0", 0, 0, 0, 1)
    assert "0 of 8 rows accepted (commit: group, all at once)" in list(headline(life_of(record, commit="group")))


def test_a_group_of_a_cancelled_batch_does_not_run_and_has_no_deadline() -> None:
    """It was said to run until the batch's client came to close it."""
    record = GroupRecord("running", 1, "math/0", "1-0", 0, 0, 3, 1)
    life = dataclasses.replace(life_of(record), batch_state="closed", batch_reason="wrong checkpoint")
    assert list(headline(life)) == [
        "group 0 of batch b (closed): cancelled when running on math/0, attempt 1",
        "3 of 8 rows accepted",
        "the batch was cancelled: wrong checkpoint",
    ]

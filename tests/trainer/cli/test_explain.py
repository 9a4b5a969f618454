"""`explain`: a group's life, also when it is over and when its beginning is gone."""

from __future__ import annotations

import asyncio

from rolloutbus.broker.group_life import GroupEvent, GroupLife
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
    from rolloutbus.broker.group_life import GroupRecord

    record = GroupRecord("running", 2, "math/0", "1-0", 1, 0, 3, 1_000, idle_s=31.0)
    event = GroupEvent(1_000, "published", 0, "-", "")
    said = " ".join(headline(GroupLife("b", 0, 40_000, (event,), record, "sealed", None, False, 1_000)))
    assert "has run out, anybody may take it over" in said
    assert "1 infra" in said

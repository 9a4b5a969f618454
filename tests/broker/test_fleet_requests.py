"""What the shards' records show to be wrong with a wish, and what only the fleet can tell."""

from __future__ import annotations

import pytest
from rolloutbus.broker.fleet_requests import Request, mistake_in, read_requests
from rolloutbus.broker.shard_records import ShardRecord

RECORDS = {"math": ShardRecord(labels=["math/1"]), "words": ShardRecord(replicas=2), "lost": ShardRecord(replicas=0)}


@pytest.mark.parametrize(
    ("request_", "mistake"),
    [
        (Request.to_scale("math", 9), None),
        (Request.to_scale("lost", 1), None),
        (Request.to_scale("word", 2), "no shard 'word' (did you mean 'words'?); there are lost, math, words"),
        (Request.to_scale("words/0", 2), "no shard 'words/0' (did you mean 'words'?); there are"),
        (Request.to_drain("words/1"), None),
        (
            Request.to_drain("wrds/1"),
            "no instance 'wrds/1' (did you mean 'words/1'?); there are math/1, words/0, words/1",
        ),
        (Request.to_drain("words"), "words is a shard, and no instance of it is called so; its instances: words/0, w"),
        (Request.to_drain("lost"), "lost is a shard, and no instance of it is called so; its instances: none"),
        (Request.to_drain("math/1"), "math/1 is the last instance of shard math; scale it up first"),
        (Request("1", "of:tomorrow"), None),
    ],
)
def test_names_that_nobody_has_and_last_instances_are_mistakes(request_: Request, mistake: str | None) -> None:
    found = mistake_in(request_, RECORDS)
    assert found is None if mistake is None else mistake in str(found)


def test_a_last_instance_may_be_drained_after_a_scale_that_stands() -> None:
    wish = Request.to_drain("math/1")
    assert mistake_in(wish, RECORDS, ["scale:math"]) is None
    assert mistake_in(wish, RECORDS, ["scale:words", "drain:math/1"]) is not None


def test_an_instance_that_lives_is_left_to_the_fleet() -> None:
    assert mistake_in(Request.to_drain("math/2"), RECORDS, lives=True) is None
    assert mistake_in(Request.to_drain("math/1"), RECORDS, lives=True) is not None
    assert mistake_in(Request.to_scale("chess", 2), RECORDS, lives=True) is not None


def test_wishes_are_told_as_they_are_typed() -> None:
    fields = [b"want:scale:math", b"a 3", b"answer:b", b"ok", b"want:drain:math/1", b"c 0"]
    assert [wish.words for wish in read_requests(fields)] == ["scale math 3", "drain math/1"]

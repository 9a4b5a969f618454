"""A batch by the beginning of its id: whichever it can only be is taken, and a command that ends it asks for more."""

from __future__ import annotations

import pytest
from rolloutbus.broker.errors import ConfigError
from rolloutbus.trainer.cli.targets import the_only

from .conftest import Stage, call

KNOWN = ("4f1c0a9be210", "4f1c0a9b77aa", "9d00ffee1234", "9d")


@pytest.fixture
def batches(stage: Stage) -> Stage:
    """Two that are there and begin alike, and one that is over: only its events are left."""
    for batch in KNOWN[:2]:
        stage.redis.hset(stage.keys.batch(batch), mapping={"client": "c", "state": "open", "groups": "1"})
    for batch in KNOWN[:3]:
        event = {"kind": "published", "batch": batch, "group": "0", "attempt": "0", "instance": "-", "detail": ""}
        stage.redis.xadd(stage.keys.events, event)
    return stage


@pytest.mark.parametrize(
    ("beginning", "batch"),
    [
        ("4f1c0a9be", KNOWN[0]),
        ("4f1c0a9b7", KNOWN[1]),
        ("9d0", KNOWN[2]),
        ("9d", "9d"),
        ("f", "f"),
        (KNOWN[0], KNOWN[0]),
    ],
)
def test_a_beginning_is_enough_where_only_one_begins_so(beginning: str, batch: str) -> None:
    assert the_only(beginning, KNOWN) == batch


def test_a_beginning_of_several_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"any of 2 batches; give more of the id: 4f1c0a9b77aa, 4f1c0a9be210$"):
        the_only("4f1c", KNOWN)
    with pytest.raises(ConfigError, match=r"b09 and 5 more$"):
        the_only("b", [f"b{number:02}" for number in range(15)])


def test_to_end_a_batch_eight_characters_are_needed_or_the_whole_id() -> None:
    with pytest.raises(ConfigError, match="give 8 characters at least, or the whole id; so begin: 9d00ffee1234"):
        the_only("9d00ffe", KNOWN[:3], 8)
    assert the_only("9d00ffee", KNOWN, 8) == "9d00ffee1234"
    assert the_only("9d", KNOWN, 8) == "9d"


def test_explain_takes_the_beginning_of_an_id_also_of_a_batch_that_is_over(batches: Stage) -> None:
    """It took whole ids only."""
    assert call("explain", "4f1c0a9be", "0", "--json").json["batch"] == KNOWN[0]
    assert "group 0 of batch 9d00ffee1234" in call("explain", "9", "0").out
    assert "4f1c0a9b77aa, 4f1c0a9be210" in call("explain", "4f1c", "0", code=2).said
    assert "nothing is known of group 0 of batch 'f'" in call("explain", "f", "0", code=1).said


def test_cancel_takes_the_beginning_of_an_id_if_it_is_long_enough(batches: Stage) -> None:
    assert "give 8 characters at least" in call("cancel", "4f1c0a9", code=2).said
    assert "any of 2 batches" in call("cancel", "4f1c0a9b", code=2).said
    assert "no open batch '9d00ffee1'" in call("cancel", "9d00ffee1", code=1).said
    states = [batches.redis.hget(batches.keys.batch(batch), "state") for batch in KNOWN[:2]]
    assert states == ["open", "open"]
    assert call("cancel", "4f1c0a9be", "--json").json["batch"] == KNOWN[0]
    assert batches.redis.hget(batches.keys.batch(KNOWN[0]), "state") == "closed"

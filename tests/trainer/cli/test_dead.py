"""`dead`: whole groups, listed, shown, run again, dropped."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

from rolloutbus.broker.codec import encode_rows

from .conftest import ROUTE, SHARD, Row, Stage, call, comes_true, rows_of, take


def bury(stage: Stage, *deeds: str) -> list[str]:
    """Run a batch whose groups do these deeds to its end; the ids of the dead letters."""
    batch = stage.batch(rows_of(*deeds))
    take(batch, len(deeds))
    return [letter["id"] for letter in call("dead", "list", "--json").json["dead_letters"]]


def test_list_names_group_route_and_failure(stage: Stage) -> None:
    stage.instance()
    assert "no dead letters" in call("dead", "list").out
    bury(stage, "ok", "fail")
    (letter,) = call("dead", "list", "--json").json["dead_letters"]
    assert (letter["group"], letter["route"], letter["rows"], letter["first_row"]) == (1, ROUTE, 2, 2)
    assert letter["failure"]["type"] == "ValueError"
    shown = call("dead", "list").out
    assert letter["id"] in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_show_prints_the_traceback_and_the_rows_as_published(stage: Stage) -> None:
    stage.instance()
    (letter,) = bury(stage, "fail")
    shown = call("dead", "show", letter, "--rows").out
    assert "ValueError: no number in [the] answer" in shown
    rows = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert [(row["_rowidx"], row["do"]) for row in rows] == [(0, "fail"), (1, "fail")]


def test_show_with_rows_and_json_is_one_document(stage: Stage) -> None:
    stage.instance()
    (letter,) = bury(stage, "fail")
    shown = call("dead", "show", letter, "--rows", "--json").json
    assert shown["id"] == letter
    assert [row["do"] for row in shown["rows_published"]] == ["fail", "fail"]
    assert "rows_published" not in call("dead", "show", letter, "--json").json


def test_replay_runs_the_group_again_and_prints_what_comes_back(stage: Stage) -> None:
    instance = stage.instance()
    (letter,) = bury(stage, "fail")
    failed = call("dead", "replay", letter, code=1)
    assert failed.out.count('"failure"') == 2
    assert "1 group failed again" in failed.said
    (again,) = (found["id"] for found in call("dead", "list", "--json").json["dead_letters"])
    assert again != letter, "its new letter takes the old one's place"
    instance.environment.mended = True
    lines = [json.loads(line) for line in call("dead", "replay", again, "--drop").out.splitlines()]
    assert [(line["_rowidx"], line["reward"], line["instance"]) for line in lines] == [(0, 1.0, SHARD), (1, 1.0, SHARD)]
    assert call("dead", "list", "--json").json["dead_letters"] == []


def test_a_group_that_fails_in_every_replay_keeps_telling_where_it_comes_from(stage: Stage) -> None:
    """The new letter named the replay's own batch, and nobody could tell any more which prompt had failed."""
    stage.instance()
    (first,) = bury(stage, "ok", "fail")
    (published,) = call("dead", "list", "--json").json["dead_letters"]
    assert published["origin"] is None
    called = published["group_id"]
    for replays in (1, 2):
        (before,) = call("dead", "list", "--json").json["dead_letters"]
        # Under the name that the trainer knows, every time.
        again = call("dead", "replay", called, code=1)
        lines = [json.loads(line) for line in again.out.splitlines()]
        assert {(line["group_id"], line["letter"]) for line in lines} == {(before["group_id"], before["id"])}
        (letter,) = call("dead", "list", "--json").json["dead_letters"]
        assert letter["origin"] == {
            "batch": published["batch"], "group": 1, "client": "trainer", "first_row": 2, "letter": first,
            "replays": replays,
        }  # fmt: skip
        assert lines[0]["origin"] == lines[1]["origin"] == letter["origin"]
        assert letter["group_id"] != called
    assert f"runs again as batch {letter['batch']}, replay 2 of {called}" in again.said
    shown = " ".join(call("dead", "show", called).out.split())
    assert f"replay 2 of {called} (client trainer, rows 2 to 3), first buried as letter {first}" in shown
    listed = call("dead", "list").out
    assert "replay 2 of" in listed
    assert max(map(len, listed.splitlines())) <= 80


def test_a_letter_of_an_earlier_version_is_replayed_and_its_origin_is_told(stage: Stage) -> None:
    letter = letter_of(stage, rows_of("fail"), batch="b", group="7", first_row="14")
    stage.instance()
    call("dead", "replay", letter, code=1)
    (again,) = call("dead", "list", "--json").json["dead_letters"]
    assert again["origin"] == {
        "batch": "b", "group": 7, "client": "", "first_row": 14, "letter": letter, "replays": 1
    }  # fmt: skip


def letter_of(stage: Stage, rows: list[Row], **fields: str) -> str:
    """A letter as the broker would bury it; where it lies."""
    payload = b"".join(bytes(part) for part in encode_rows(rows, first_row=0))
    words = {"batch": "b", "group": "0", "rows": str(len(rows)), "reason": "failed", **fields, "payload": payload}
    return str(stage.redis.xadd(stage.keys.dead, words))


def test_replay_goes_on_past_letters_that_cannot_run(stage: Stage) -> None:
    """The first of them ended it, and being among the oldest did so every time."""
    elsewhere = [{**row, "agent_ref": {"name": "chess"}} for row in rows_of("ok")]
    letters = [
        str(stage.redis.xadd(stage.keys.dead, {"batch": "b", "group": "0", "reason": "failed"})),
        str(stage.redis.xadd(stage.keys.dead, {"reason": "foreign", "detail": "?", "payload": b"\xc1"})),
        letter_of(stage, elsewhere),
        letter_of(stage, [{"no": "row"}]),
        letter_of(stage, rows_of("ok"), batch="c", group="7"),
    ]
    stage.instance()
    answer = call("dead", "replay", "--all", "--drop", code=1)
    lines = [json.loads(line) for line in answer.out.splitlines()]
    assert [(line["group_id"], line["_rowidx"], line["reward"]) for line in lines] == [("c:7", 0, 1.0), ("c:7", 1, 1.0)]
    assert "no shard hosts the route 'chess'" in answer.said
    assert "4 groups cannot run again; `rolloutbus dead drop`" in answer.said
    assert "failed again" not in answer.said
    assert [letter["id"] for letter in call("dead", "list", "--json").json["dead_letters"]] == letters[:4]


def test_sigterm_leaves_no_batch_of_a_replay_running(stage: Stage) -> None:
    letter = letter_of(stage, rows_of("wait"))
    stage.instance()

    def end() -> None:
        comes_true(lambda: "taken" in str(stage.redis.xrange(stage.keys.events)))
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as other:
        ended = other.submit(end)
        assert "stopping, and cancelling what is out" in call("dead", "replay", letter, code=143).said
        ended.result()
    assert call("status", "--json").json["runs"][0]["batches"] == []


def test_drop_deletes_the_named_or_all(stage: Stage) -> None:
    stage.instance()
    first, *others = bury(stage, "fail", "fail", "fail")
    assert "1 dead letter dropped" in call("dead", "drop", first).out
    assert [letter["id"] for letter in call("dead", "list", "--json").json["dead_letters"]] == others
    assert "2 dead letters dropped" in call("dead", "drop", "--all").out


def test_dead_letters_are_named_or_all_but_not_nothing(stage: Stage) -> None:
    assert "--all" in call("dead", "drop", code=2).said
    assert "no dead letter '1-1'" in call("dead", "show", "1-1", code=1).said

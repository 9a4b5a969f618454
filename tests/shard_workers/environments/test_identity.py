"""Group identity: the same for siblings, never the same twice, and the caller's own values on the way back."""

from __future__ import annotations

from typing import Any

from rolloutbus.shard_workers.environments.identity import FIELDS, restore, stamped

ROWS: list[dict[str, Any]] = [{"_rowidx": at, "_group_id": "b:7:2", "_ng_task_index": 3, "x": [at]} for at in range(4)]


def test_siblings_share_all_but_their_place() -> None:
    rows = stamped(ROWS, 11)
    assert [row["_ng_rollout_index"] for row in rows] == [0, 1, 2, 3]
    assert len({(row["_ng_task_index"], row["_ng_group_id"], row["_ng_group_attempt"]) for row in rows}) == 1
    assert rows[0]["_ng_group_id"] == "b:7"


def test_no_two_calls_share_a_task_index_and_the_attempt_of_a_group_grows() -> None:
    again = [
        stamped([{**row, "_group_id": group} for row in ROWS], call)[0]
        for call, group in enumerate(["b:7:2", "b:7:2", "b:8:2"])
    ]
    assert len({row["_ng_task_index"] for row in again}) == 3
    assert again[0]["_ng_group_attempt"] < again[1]["_ng_group_attempt"]


def test_the_task_index_is_a_whole_number_that_json_keeps() -> None:
    assert all(0 <= stamped(ROWS, call)[0]["_ng_task_index"] < 2**53 for call in range(100))


def test_the_given_rows_stay_as_they_are_and_the_workers_own_key_does_not_travel() -> None:
    before = [dict(row) for row in ROWS]
    assert all("_group_id" not in row for row in stamped(ROWS, 1))
    assert before == ROWS


def test_what_the_caller_had_is_put_back_and_what_it_had_not_is_taken_out() -> None:
    result: dict[str, Any] = {**dict.fromkeys(FIELDS, 99), "reward": 1.0}
    assert restore(result, {"_ng_task_index": 3, "_ng_group_id": "own"}) == {
        "_ng_task_index": 3,
        "_ng_group_id": "own",
        "reward": 1.0,
    }


def test_a_result_that_echoes_nothing_gets_nothing() -> None:
    assert restore({"reward": 1.0}, {"_ng_task_index": 3}) == {"reward": 1.0}

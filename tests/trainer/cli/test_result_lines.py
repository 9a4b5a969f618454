"""Result lines are valid JSON whatever an environment returned."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.collector import CompletedGroup, GroupFailure, Origin
from rolloutbus.trainer.cli.result_lines import completed_lines, failed_lines, reward_of, to_json

ROW = {"_rowidx": 4, "agent_ref": {"name": "a"}, "responses_create_params": {}}


def strictly(line: str) -> Any:
    """Parse as a reader would that knows no NaN."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_completed_row_tells_who_what_and_where() -> None:
    group = CompletedGroup("b:2", 2, [ROW], [{"reward": 0.5, "text": "ü"}], [Origin("math/0", 3)])
    (line,) = completed_lines(group)
    assert strictly(line) == {
        "_rowidx": 4, "agent_ref": {"name": "a"}, "reward": 0.5, "instance": "math/0", "attempt": 3,
        "result": {"reward": 0.5, "text": "ü"},
    }  # fmt: skip


def test_a_failed_row_has_its_failure_and_no_reward() -> None:
    failure = GroupFailure("b:0", 0, range(1), "data", "ValueError", "no", "Traceback …", "math", 2)
    (line,) = failed_lines(failure, [ROW])
    found = strictly(line)
    assert (found["reward"], found["result"], found["failure"]["type"]) == (None, None, "ValueError")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.arange(3), [0, 1, 2]),
        (np.array([1.0, np.nan, np.inf]), [1.0, "NaN", "Infinity"]),
        (np.float32(0.5), 0.5),
        (b"\x00\xff", "AP8="),
        (float("-inf"), "-Infinity"),
        ((1, 2), [1, 2]),
        ({1: "a", b"k": 2}, {"1": "a", "aw==": 2}),
        (2**63, 2**63),
        (object, str(object)),
    ],
)
def test_what_json_lacks_has_a_form(value: Any, expected: Any) -> None:
    assert strictly(to_json({"result": value}))["result"] == expected


def test_nesting_beyond_json_costs_the_result_and_not_the_line() -> None:
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    assert strictly(to_json({"_rowidx": 1, "result": deep})) == {"_rowidx": 1, "result": "(nested too deeply for JSON)"}


def test_a_lone_surrogate_survives_the_file(tmp_path: Any) -> None:
    from rolloutbus.trainer.cli.run_command import opened

    path = tmp_path / "o.jsonl"
    with opened(str(path)) as write:
        write([to_json({"result": "\udc80"})])
    assert json.loads(path.read_text(encoding="utf-8")) == {"result": "\udc80"}


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        ({"reward": 1}, 1.0),
        ({"reward": np.float64(0.25)}, 0.25),
        ({"full_result": {"reward": 0.75}}, 0.75),
        ({"reward": "high"}, None),
        ({}, None),
        ([1], None),
    ],
)
def test_reward_is_found_or_none(result: Any, reward: float | None) -> None:
    assert reward_of(result) == reward


def test_a_reward_that_is_no_number_stays_one() -> None:
    found = reward_of({"reward": float("nan")})
    assert found is not None
    assert math.isnan(found)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.binary(), inner),
)


@given(JSON_LIKE)
def test_any_plain_value_gives_one_line_of_json(value: Any) -> None:
    line = to_json({"result": value})
    assert "\n" not in line
    strictly(line)

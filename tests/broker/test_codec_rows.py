"""What the rows of a group share: sizes, exactness, independence, and refusals by row."""

from __future__ import annotations

import copy
import json
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker import codec
from rolloutbus.broker.errors import DecodeError, EncodeError

PROMPT = "to be or not to be " * 100_000


def there_and_back(rows: list[Any]) -> list[Any]:
    return codec.decode_rows(b"".join(codec.encode_rows(rows, first_row=0)))


def group(size: int, text: str = PROMPT) -> list[dict[str, Any]]:
    return [
        {
            "responses_create_params": {"input": [{"role": "user", "content": text}], "seed": index},
            "agent_ref": {"name": "math"},
            "_rowidx": index,
        }
        for index in range(size)
    ]


def copied(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(row)) for row in rows]


# Few values of many kinds, so that siblings often agree, and often only seem to.
values = st.recursive(
    st.sampled_from([1, True, 1.0, 0.0, -0.0, None, "a" * 40, b"a" * 40, "a" * 41, float("nan"), 2**63]),
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.dictionaries(st.sampled_from(["a", "b", "c", 1, True, "x" * 40]), inner, max_size=4)
    ),
    max_leaves=25,
)
some_rows = st.dictionaries(st.sampled_from(["p", "q", "r", "s"]), values, max_size=4)


@st.composite
def groups(draw: st.DrawFn) -> list[dict[str, Any]]:
    base = draw(some_rows)
    rows: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        row = copy.deepcopy(base) if draw(st.booleans()) else dict(base)
        row.update(draw(some_rows) if draw(st.booleans()) else {})
        keys = draw(st.permutations(list(row)))
        rows.append({key: row[key] for key in keys})
    return rows


@given(groups())
def test_rows_come_back_with_their_types_and_in_their_order(rows: list[dict[str, Any]]) -> None:
    assert repr(there_and_back(rows)) == repr(rows)


@given(groups())
def test_hoisting_changes_nothing_in_the_rows_it_was_given(rows: list[dict[str, Any]]) -> None:
    before = repr(rows)
    codec.encode_rows(rows, first_row=0)
    assert repr(rows) == before


@pytest.mark.parametrize("make", [list, copied], ids=["same object", "equal copies"])
def test_a_shared_prompt_is_stored_once(make: Any) -> None:
    rows = make(group(16))
    buffers = codec.encode_rows(rows, first_row=0)
    assert codec.size_of(buffers) < len(PROMPT) + 4096
    assert codec.decode_rows(b"".join(buffers)) == rows


def test_a_small_prompt_is_stored_once_too() -> None:
    rows = copied(group(8, "x" * 1200))
    assert codec.size_of(codec.encode_rows(rows, first_row=0)) < 2 * 1200


def test_a_prompt_is_shared_where_one_row_has_a_key_more_and_another_order() -> None:
    rows = copied(group(4))
    rows[2] = {"extra": 1, **dict(reversed(rows[2].items()))}
    buffers = codec.encode_rows(rows, first_row=0)
    got = codec.decode_rows(b"".join(buffers))
    assert codec.size_of(buffers) < len(PROMPT) + 4096
    assert [list(row) for row in got] == [list(row) for row in rows]
    assert got == rows


def test_equal_arrays_are_stored_once_and_come_back_read_only() -> None:
    rows = [{"ids": np.arange(100_000.0), "_rowidx": index} for index in range(4)]
    buffers = codec.encode_rows(rows, first_row=0)
    got = codec.decode_rows(b"".join(buffers))
    assert codec.size_of(buffers) < 810_000
    assert all((row["ids"] == rows[0]["ids"]).all() and not row["ids"].flags.writeable for row in got)


def test_arrays_equal_by_value_but_not_in_dtype_or_sign_stay_apart() -> None:
    arrays = [np.zeros(500), -np.zeros(500), np.zeros(500, "f4"), np.zeros((2, 250)), np.zeros(500, ">f8")]
    got = there_and_back([{"a": array} for array in arrays])
    assert [(row["a"].dtype, row["a"].shape, row["a"].tobytes()) for row in got] == [
        (array.dtype, array.shape, array.tobytes()) for array in arrays
    ]


def test_what_stands_against_an_array_in_a_sibling_is_only_different() -> None:
    got = there_and_back([{"p": {"seed": 1, "t": "x" * 99}}, {"p": {"seed": np.arange(2), "t": "x" * 99}}])
    assert got[0]["p"]["seed"] == 1
    assert list(got[1]["p"]["seed"]) == [0, 1]


@pytest.mark.parametrize("make", [list, copied], ids=["same object", "equal copies"])
def test_siblings_share_no_container(make: Any) -> None:
    shared: Any = {"messages": [{"role": "user", "tags": ["a" * 50, list[Any]()]}], "numbers": list(range(200))}
    rows = make([{"p": shared, "_rowidx": index} for index in range(3)])
    got = there_and_back(rows)
    got[0]["p"]["messages"][0]["tags"][1].append("mine")
    got[1]["p"]["numbers"].append("mine")
    got[1]["p"]["new"] = 1
    assert got[2] == rows[2]
    assert got[0]["p"]["numbers"] == rows[0]["p"]["numbers"]
    assert got[1]["p"]["messages"] == rows[1]["p"]["messages"]


def test_long_lists_that_differ_only_in_a_type_stay_apart() -> None:
    rows = [{"l": [1] * 5000 + [last], "t": {"deep": ["x" * 70_000, last]}} for last in (1, True, 1.0)]
    assert repr(there_and_back(rows)) == repr(rows)


def test_identical_rows_one_row_and_no_row_come_back() -> None:
    row = group(1)[0]
    assert there_and_back([row, row, row]) == [row, row, row]
    assert there_and_back([row]) == [row]
    assert there_and_back([]) == []
    assert there_and_back([{}, {}]) == [{}, {}]


def test_any_mapping_may_be_a_row() -> None:
    assert there_and_back([types.MappingProxyType({"a": 1})]) == [{"a": 1}]


def test_deep_values_are_shared_without_recursion() -> None:
    deep: Any = ["x" * 50]
    for level in range(900):
        deep = [deep] if level % 2 else {"d": deep}
    got = there_and_back([{"a": deep}, {"a": deep}])
    assert codec.encode(got[0]) == codec.encode({"a": deep}) == codec.encode(got[1])
    assert got[0]["a"] is not got[1]["a"]


class Marker:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


codec.register(Marker, lambda marker: marker.items, Marker, name="tests.marker")


def test_registered_types_are_never_shared() -> None:
    marker = Marker(["x" * 100])
    got = there_and_back([{"m": {"in": marker}, "t": "y" * 100} for _ in range(3)])
    got[0]["m"]["in"].items.append(1)
    assert got[1]["m"]["in"].items == ["x" * 100]


def test_a_list_that_would_unfold_beyond_the_limit_is_not_shared() -> None:
    numbers = [0] * 1_200_000
    rows = [{"numbers": numbers} for _ in range(16)]
    buffers = codec.encode_rows(rows, first_row=0)
    assert codec.size_of(buffers) > 16 * len(numbers)
    assert codec.decode_rows(b"".join(buffers)) == rows


@pytest.mark.parametrize("bad", [0, 2], ids=["in the first", "in a later"])
def test_a_refusal_names_the_row_in_the_batch(bad: int) -> None:
    rows: list[dict[str, Any]] = copied(group(3, "short"))
    rows[bad]["responses_create_params"]["tools"] = [{"schema": {1}}]
    with pytest.raises(EncodeError) as caught:
        codec.encode_rows(rows, first_row=15)
    assert str(caught.value) == (
        f"row {15 + bad}: responses_create_params.tools[0].schema is a set, which msgpack cannot carry; "
        "convert it to a list"
    )


def test_a_row_that_is_no_mapping_is_refused() -> None:
    rows: Any = [{}, [1]]
    with pytest.raises(EncodeError, match="row 4 is a list, and a row is a dict; convert it to one"):
        codec.encode_rows(rows, first_row=3)


def test_rows_and_values_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(DecodeError, match="read it with decode_rows"):
        codec.decode(b"".join(codec.encode_rows(group(2), first_row=0)))
    with pytest.raises(DecodeError, match="read it with decode"):
        codec.decode_rows(b"".join(codec.encode([{"a": 1}])))

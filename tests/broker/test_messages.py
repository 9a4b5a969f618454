"""Entries on the streams: what we write we read, and what we did not write is told as foreign."""

from __future__ import annotations

import itertools
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker import codec
from rolloutbus.broker.channel import Arg, Payload
from rolloutbus.broker.messages import (
    Failure,
    ForeignEntryError,
    GroupEntry,
    frame,
    group_fields,
    parse_group,
    parse_result,
    row_fields,
    unframe,
)

from tests.entries import rows_payload

GROUP = GroupEntry("5-1", "b", 3, "trainer", "adds", 8, 24, b"payload")


def on_the_wire(fields: tuple[Arg, ...]) -> list[bytes]:
    return [field.joined() if isinstance(field, Payload) else str(field).encode() for field in fields]


def group_words() -> list[bytes]:
    return on_the_wire(group_fields("b", 3, "trainer", "adds", 8, 24, Payload.of([b"pay", b"load"])))


def result_words() -> list[bytes]:
    return on_the_wire(row_fields(GROUP, (0, 7), 2, "math/1", "timing", Payload.of([b"payload"])))


def without(words: list[bytes], name: bytes) -> list[bytes]:
    at = words.index(name)
    return words[:at] + words[at + 2 :]


def test_a_group_is_read_as_it_was_written():
    assert parse_group(b"5-1", group_words()) == GROUP


def test_rows_are_read_as_they_were_written():
    entry = parse_result(b"9-9", result_words())
    assert (entry.kind, entry.batch, entry.group, entry.row_indices) == ("rows", "b", 3, (24, 31))
    assert (entry.attempt, entry.instance, entry.timing, entry.payload) == (2, "math/1", "timing", b"payload")


def test_a_failures_entry_names_all_its_rows():
    words = [b"kind", b"failed", b"batch", b"b", b"group", b"3", b"rows", b"2", b"first_row", b"6", b"attempt", b"1"]
    entry = parse_result(b"9-9", [*words, b"instance", b"math", b"payload", b"x"])
    assert (entry.kind, entry.row_indices, entry.payload) == ("failed", (6, 7), b"x")


def test_a_cancellation_is_read_with_its_reason():
    entry = parse_result(b"9-9", [b"kind", b"cancelled", b"batch", b"b", b"reason", b"wrong data"])
    assert (entry.kind, entry.batch, entry.group, entry.payload) == ("cancelled", "b", -1, b"wrong data")


@pytest.mark.parametrize("field", [b"kind", b"batch", b"group", b"client", b"route", b"rows", b"first_row", b"payload"])
def test_a_group_that_lacks_a_field_is_foreign_and_the_error_names_it(field: bytes):
    with pytest.raises(ForeignEntryError, match=f"5-1.*{field.decode()}"):
        parse_group(b"5-1", without(group_words(), field))


@pytest.mark.parametrize("field", [b"kind", b"batch", b"group", b"row_indices", b"attempt", b"instance", b"payload"])
def test_a_result_that_lacks_a_field_is_foreign_and_the_error_names_it(field: bytes):
    with pytest.raises(ForeignEntryError, match=f"9-9.*{field.decode()}"):
        parse_result(b"9-9", without(result_words(), field))


@pytest.mark.parametrize("fields", [None, [], [b"kind"], [b"a", b"b"], [b"kind", b"other"], [b"kind", b"\xff"]])
def test_what_is_no_entry_of_ours_is_foreign(fields: Any):
    for parse in (parse_group, parse_result):
        with pytest.raises(ForeignEntryError, match="5-1"):
            parse(b"5-1", fields)


@pytest.mark.parametrize("value", [b"x", b"", b"1.5", b"\xff"])
@pytest.mark.parametrize("field", [b"group", b"rows", b"first_row"])
def test_a_number_that_is_none_is_foreign(field: bytes, value: bytes):
    words = group_words()
    words[words.index(field) + 1] = value
    with pytest.raises(ForeignEntryError):
        parse_group(b"5-1", words)


def test_an_entry_of_large_fields_reads_as_one_of_small_ones():
    """Large strings come as views; a group of some thousand rows has that many row indices, and the reader that met
    them ended with an AttributeError.
    """
    words = [memoryview(bytearray(word)) for word in result_words()]
    entry = parse_result(b"9-9", words)  # pyright: ignore[reportArgumentType]
    plain = parse_result(b"9-9", result_words())
    assert entry._replace(payload=bytes(entry.payload)) == plain


# Failures


def test_a_failure_survives_the_broker():
    failure = Failure("infra", "TimeoutError", "zu spät", "Traceback …", "math/0", 3, 503)
    assert Failure.unpacked(failure.packed()) == failure


def test_what_only_a_newer_version_knows_of_a_failure_is_left_out():
    packed = b"".join(codec.encode({"failure_class": "data", "type": "E", "message": "m", "mood": "bad"}))
    assert Failure.unpacked(packed) == Failure("data", "E", "m")


@pytest.mark.parametrize(
    "payload", [b"", b"garbage", b"\xc1", b"".join(codec.encode([1])), b"".join(codec.encode({"type": "E"}))]
)
def test_a_failure_that_cannot_be_read_is_still_a_failure(payload: bytes):
    failure = Failure.unpacked(payload)
    assert (failure.type, failure.failure_class) == ("UnreadableFailure", "data")


# Several rows in one entry

PARTS = st.lists(st.lists(st.binary(max_size=70), max_size=3), max_size=6)


@given(PARTS)
def test_framed_payloads_come_apart_as_they_were(parts: list[list[bytes]]):
    whole = frame([Payload.of(part) for part in parts])
    assert whole.size == len(whole.joined())
    assert [bytes(view) for view in unframe(whole.joined())] == [b"".join(part) for part in parts]


@given(PARTS)
def test_framed_payloads_are_aligned(parts: list[list[bytes]]):
    whole = frame([Payload.of(part) for part in parts]).joined()
    offsets = [whole_offset(whole, view) for view in unframe(whole)]
    assert all(offset % 16 == 0 for offset in offsets)


def whole_offset(whole: bytes, view: memoryview) -> int:
    start = cast("Any", np).frombuffer(whole, np.uint8).ctypes.data
    return cast("Any", np).frombuffer(view, np.uint8).ctypes.data - start if view.nbytes else 0


def test_framing_is_msgpack():
    whole = frame([Payload.of([b"a"]), Payload.of([b"bc"])]).joined()
    assert cast(Any, msgpack).unpackb(whole)[1::2] == [b"a", b"bc"]


@given(st.data())
def test_a_framing_that_was_cut_or_changed_is_foreign(data: st.DataObject):
    whole = frame([Payload.of([b"abc"]), Payload.of([b"d" * 40])]).joined()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ForeignEntryError):
        unframe(whole[:cut])
    with pytest.raises(ForeignEntryError):
        unframe(whole + b"x")


@given(st.binary(max_size=80))
def test_no_bytes_make_unframing_fail_otherwise(noise: bytes):
    for payload in (noise, b"\xdd" + noise):
        try:
            views = unframe(payload)
        except ForeignEntryError:
            continue
        assert sum(view.nbytes for view in views) < len(payload)


def test_results_are_encoded_row_by_row():
    results = [{"reward": 1.0}, {"reward": 0.0, "tokens": list(range(20))}]
    views = unframe(rows_payload(results).joined())
    assert [codec.decode(view) for view in views] == results
    assert list(itertools.chain(*map(bytes, views)))

"""Payloads that were cut, altered or made up: a DecodeError, and no memory beyond the payload's own order."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutbus.broker import codec
from rolloutbus.broker.errors import DecodeError

packb: Callable[[Any], bytes] = cast(Any, msgpack).packb
ExtType: Any = cast(Any, msgpack).ExtType
ARRAY, SCALAR, REGISTERED, SHARED = 1, 2, 4, 5
Decode = Callable[[bytes], Any]


def decode_writable(payload: bytes) -> Any:
    return codec.decode(payload, writable=True)


class Box:
    def __init__(self, value: object) -> None:
        self.value = value


codec.register(Box, lambda box: box.value, Box, name="tests.box")

VALUE = {
    "text": "grün" * 9,
    "numbers": [1, -1, 2**40, 1.5, None, True],
    "big": np.arange(300.0),
    "bigger": np.arange(2000, dtype=">i2").reshape(2, 1000),
    "small": np.arange(6, dtype="c8").reshape(2, 3),
    "when": np.datetime64("2026-01-01", "ns"),
    "name": np.str_("n"),
    "box": Box({"in": np.zeros(200)}),
}
VALID = b"".join(codec.encode(VALUE))
VALID_ROWS = b"".join(
    codec.encode_rows(
        [
            {"p": {"t": "x" * 60, "l": [[1], {"a": 2}] * 9, "i": i}, "a": VALUE["big"], "b": VALUE["box"]}
            for i in range(4)
        ],
        first_row=0,
    )
)


def payload_of(doc: bytes, tail: bytes = b"") -> bytes:
    return struct.pack(">BBI", 0x93, 0xCE, len(doc)) + doc + struct.pack(">BI", 0xC6, len(tail)) + tail


def ext(code: int, fields: object) -> Any:
    return ExtType(code, packb(fields))


def made_up(code: int, *fields: object) -> bytes:
    return payload_of(packb(ext(code, fields)), bytes(4096 + 15))


def survives(decode: Decode, payload: bytes) -> None:
    """Any value is fine (a flipped bit of a text is a text), any error but DecodeError is not."""
    with contextlib.suppress(DecodeError):
        decode(payload)


def peak_of(decode: Decode, payload: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode(payload)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


cases: list[tuple[Decode, bytes]] = [
    (codec.decode, VALID),
    (decode_writable, VALID),
    (codec.decode_rows, VALID_ROWS),
]
decoders = st.sampled_from(cases)
edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)


@given(decoders, edits)
@settings(max_examples=1500, deadline=None)
def test_altered_payloads_raise_nothing_but_decode_errors(case: Any, changes: list[tuple[float, int]]) -> None:
    decode, valid = case
    payload = bytearray(valid)
    # The interesting bytes are those of the doc, so most of the edits go there.
    doc_end = 11 + int.from_bytes(valid[2:6], "big")
    for number, (place, byte) in enumerate(changes):
        payload[int(place * (doc_end if number % 4 else len(payload)))] = byte
    survives(decode, bytes(payload))


@given(decoders, st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_made_up_documents_raise_nothing_but_decode_errors(case: Any, doc: bytes) -> None:
    survives(case[0], payload_of(doc))
    survives(case[0], payload_of(b"\x94\xa4rows\xce\x00\x00\x00\x05\xdd\x00\x00\x00\x00" + doc))
    survives(case[0], doc)


leaf_fields = st.tuples(
    st.sampled_from(["<f8", "|O", "O", "|b1", "<U4", "<M8[ns]", "<f16:63", "V8", "float32", "f4,f4", ""])
    | st.integers(-9, 9),
    st.lists(st.sampled_from([0, 1, 2, 8, -1, 2**40, 2**63, 2**64 - 1, True, None, "1"]), max_size=5),
    st.sampled_from([0, 8, 16, 4096, 5000, -16, 2**63, None, b"", b"12345678"]),
    st.sampled_from([0, 8, 16, 4096, -8, 2**63, 2**64 - 1, None]),
)


@given(st.sampled_from([ARRAY, SCALAR]), leaf_fields, st.integers(0, 4))
@settings(max_examples=1500, deadline=None)
def test_made_up_arrays_raise_nothing_but_decode_errors(code: int, fields: Any, count: int) -> None:
    survives(codec.decode, made_up(code, *fields[:count]))


@pytest.mark.parametrize("valid", [VALID, VALID_ROWS], ids=["value", "rows"])
def test_every_truncation_and_any_trailing_byte_is_refused(valid: bytes) -> None:
    decode: Any = codec.decode if valid is VALID else codec.decode_rows
    for end in range(len(valid)):
        with pytest.raises(DecodeError):
            decode(valid[:end])
    with pytest.raises(DecodeError, match="cut or altered"):
        decode(valid + b"\x00")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "malformed, cut or altered"),
        (packb({"a": 1}), "malformed, cut or altered"),
        (b"\x92" + VALID[1:], r"does not have the layout \[length, doc, tail\]"),
        (payload_of(b"\x01\x01"), "malformed, cut or altered"),
        (payload_of(b"\xa2\xff\xff"), "malformed, cut or altered"),
        (payload_of(b"\x81\x90\x01"), "malformed, cut or altered"),
        (payload_of(b"\xc1"), "malformed, cut or altered"),
        (payload_of(b"\x91" * 100_000 + b"\x00"), "malformed, cut or altered"),
        (payload_of(b"\xdd\xff\xff\xff\xff"), "malformed, cut or altered"),
        (payload_of(packb(ExtType(77, b""))), "extension type 77, which does not belong here"),
        (payload_of(packb(ExtType(SHARED, b"\0"))), "read it with decode_rows"),
        (made_up(ARRAY, "|O", [512], 0, 4096), r"numpy dtype '\|O', which is not one that may travel"),
        (made_up(ARRAY, "<f8", [513], 0, 4096), r"shape \[513\] and '<f8' whose bytes do not match"),
        (made_up(ARRAY, "<f8", [2**32, 2**32], 0, 0), "whose bytes do not match"),
        (made_up(ARRAY, "<f8", [-1], 0, 0), "whose bytes do not match"),
        (made_up(ARRAY, "<f8", [-2, -256], 0, 4096), "which numpy refuses"),
        (made_up(ARRAY, "<f8", [1] * 70, 0, 8), "which numpy refuses"),
        (made_up(ARRAY, "<f8", ["512"], 0, 4096), "dtype or shape is malformed"),
        (made_up(ARRAY, "<f8", [512.0], 0, 4096), "dtype or shape is malformed"),
        (made_up(ARRAY, "<f8", [512, True], 0, 4096), "dtype or shape is malformed"),
        (made_up(ARRAY, "<f8", None, 0, 4096), "dtype or shape is malformed"),
        (made_up(ARRAY, "<f8", 512, 0, 4096), "dtype or shape is malformed"),
        (made_up(ARRAY, ["<f8"], [512], 0, 4096), "dtype or shape is malformed"),
        (made_up(ARRAY, 8, [512], 0, 4096), "dtype or shape is malformed"),
        (made_up(ARRAY, "<f8", [1], None), "which numpy refuses"),
        (made_up(ARRAY, "<f8", [1], "12345678"), "which numpy refuses"),
        (made_up(ARRAY, "<f8", [0, 2**62, 2**62], 0, 0), "which numpy refuses"),
        (made_up(ARRAY, "<f8", [512], 16, 4096), "ends outside of it"),
        (made_up(ARRAY, "<f8", [1], -8, 8), "place is malformed"),
        (made_up(ARRAY, "<f8", [2], b"12345678"), "whose bytes do not match"),
        (made_up(SCALAR, "<f8", b"1234"), "scalar of 4 bytes instead of 8"),
        (made_up(SCALAR, "<f16:99", bytes(16)), "another machine's width"),
    ],
)
def test_a_faulty_payload_is_refused_with_a_reason(payload: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        codec.decode(payload)


def test_what_is_no_payload_at_all_is_a_decode_error() -> None:
    text: Any = "text"
    with pytest.raises(DecodeError, match="bytes-like"):
        codec.decode(text)


def test_registered_types_nested_without_end_are_refused() -> None:
    doc = packb(1)
    for _ in range(400):
        doc = packb(ExtType(REGISTERED, b"\x92" + packb("tests.box") + doc))
    with pytest.raises(DecodeError, match="nests registered types more than 8 deep"):
        codec.decode(payload_of(doc))


def test_a_list_longer_than_the_trusted_length_still_comes_back() -> None:
    value = [list(range(70_000)), {"a": [None] * 20_000}, np.zeros(400)]
    got = codec.decode(b"".join(codec.encode(value)), writable=True)
    assert got[:2] == value[:2]


def test_huge_declared_lengths_allocate_nothing_of_their_size() -> None:
    for header in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        assert peak_of(codec.decode, payload_of(header + b"\x7f\xff\xff\xff" + bytes(100))) < 1 << 20


def test_nested_lists_that_each_declare_the_whole_payload_stay_small() -> None:
    size = 4_000_000
    chain = (b"\xdd" + size.to_bytes(4, "big")) * 1000
    assert peak_of(codec.decode, payload_of(chain + bytes(size - len(chain)))) < 2 * size


def test_many_pointers_to_one_region_cannot_be_copied_many_times() -> None:
    pointer = ext(ARRAY, ["|u1", [1_000_000], 0, 1_000_000])
    payload = payload_of(packb([pointer] * 1000), bytes(1_000_016))
    assert peak_of(decode_writable, payload) < 4_000_000
    assert len(codec.decode(payload)) == 1000


def test_rows_that_point_often_at_a_long_list_are_bounded() -> None:
    pool = packb([[0] * 1_000_000])
    pool = b"\xdd\x00\x00\x00\x01" + pool[1:]
    rows = packb([{"a": ExtType(SHARED, b"\0")}] * 100_000)
    doc = b"\x94\xa4rows\xce" + len(pool).to_bytes(4, "big") + pool + rows
    assert peak_of(codec.decode_rows, payload_of(doc)) < 1 << 29


FAULTY_GROUPS: list[tuple[list[Any], Any]] = [
    ([1], [{"a": ExtType(SHARED, b"\x01")}]),
    ([1], [{"a": ExtType(SHARED, b"\xff" * 200)}]),
    ([ExtType(SHARED, b"\x00")], [{}]),
    ([ExtType(REGISTERED, packb(["tests.box", 1]))], [{}]),
    ([1], [1]),
    ([1], {"a": 1}),
]


@pytest.mark.parametrize(
    ("pool", "rows"),
    FAULTY_GROUPS,
)
def test_faulty_groups_are_refused(pool: list[Any], rows: Any) -> None:
    packed = b"\xdd" + len(pool).to_bytes(4, "big") + b"".join(map(packb, pool))
    doc = b"\x94\xa4rows\xce" + len(packed).to_bytes(4, "big") + packed + packb(rows)
    with pytest.raises(DecodeError):
        codec.decode_rows(payload_of(doc))

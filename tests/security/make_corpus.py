"""Writes the corpus of hostile payloads: `python -m tests.security.make_corpus`; the files are committed, so that CI
plays the same ones.

Each file's name says what is wrong with it. `valid-*` are what they were made from, and must decode.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
from rolloutbus.broker import codec
from rolloutbus.broker.channel import Payload
from rolloutbus.broker.messages import frame

FOLDER = Path(__file__).parent / "corpus"
ARRAY, SCALAR, TENSOR, REGISTERED, SHARED = 1, 2, 3, 4, 5
_packb = cast(Any, msgpack).packb
_ext = cast(Any, msgpack).ExtType


def _valid() -> dict[str, bytes]:
    value = {
        "text": "é" * 40,
        "list": [1, 2.5, None, True, 2**40],
        "array": np.arange(64, dtype="<f4"),
        "x": np.int16(3),
    }
    rows = [{"p": {"t": "x" * 90}, "array": np.arange(16), "_rowidx": at} for at in range(3)]
    one = b"".join(codec.encode(value))
    return {
        "valid-value": one,
        "valid-rows": b"".join(codec.encode_rows(rows, first_row=0)),
        "valid-frame": frame([Payload.of(codec.encode(value)), Payload.of(codec.encode({"a": 1}))]).joined(),
    }


def _wrapped(doc: bytes, tail: bytes = b"") -> bytes:
    return struct.pack(">BBI", 0x93, 0xCE, len(doc)) + doc + struct.pack(">BI", 0xC6, len(tail)) + tail


def _leaf(code: int, *fields: Any) -> bytes:
    return _wrapped(_packb(_ext(code, _packb(fields))), bytes(64))


def _hostile(valid: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    for name, payload in valid.items():
        kind = name.removeprefix("valid-")
        yield f"cut-in-half-{kind}", payload[: len(payload) // 2]
        yield f"cut-last-byte-{kind}", payload[:-1]
        yield f"trailing-{kind}", payload + b"\0"
        yield f"flipped-{kind}", bytes([payload[0] ^ 0xFF, *payload[1:]])
    yield "empty", b""
    yield "pickle", b"cos\nsystem\n(S'true'\ntR."
    yield "nested-deep-lists", _wrapped(b"\x91" * 5_000 + b"\xc0")
    yield "nested-deep-maps", _wrapped(b"\x81\xa1a" * 5_000 + b"\xc0")
    yield "declared-list-4g", _wrapped(b"\xdd\xff\xff\xff\xff")
    yield "declared-map-4g", _wrapped(b"\xdf\xff\xff\xff\xff")
    yield "declared-bytes-4g", _wrapped(b"\xc6\xff\xff\xff\xff")
    yield "declared-text-4g", _wrapped(b"\xdb\xff\xff\xff\xff")
    yield "declared-extension-4g", _wrapped(b"\xc9\xff\xff\xff\xff\x01")
    yield "declared-doc-4g", struct.pack(">BBI", 0x93, 0xCE, 0xFFFFFFFF) + b"\xc0"
    yield "declared-frame-4g", b"\xdd\xff\xff\xff\xff" + b"\xc4\x00\xc6\x00\x00\x00\x00" * 3
    yield "frame-pads-beyond", b"\xdd\x00\x00\x00\x02\xc4\xff\xc6\x00\x00\x00\x00"
    yield "list-of-lists-of-4g", _wrapped(b"\xdd\x00\x0f\xff\xff" * 2_000)
    yield "unknown-extension-99", _wrapped(_packb(_ext(99, b"x")))
    yield "unknown-registration", _wrapped(_packb(_ext(REGISTERED, _packb(["os.system", "true"]))))
    yield "shared-outside-of-rows", _wrapped(_packb(_ext(SHARED, _packb(0))))
    yield "array-of-objects", _leaf(ARRAY, "|O", [4], 0, 32)
    yield "array-beyond-tail", _leaf(ARRAY, "<f8", [1 << 40], 0, 1 << 43)
    yield "array-negative-shape", _leaf(ARRAY, "<f8", [-1], 0, 8)
    yield "array-offset-outside", _leaf(ARRAY, "<f8", [1], 1 << 62, 8)
    yield "array-shape-overflows", _leaf(ARRAY, "<f8", [1 << 32, 1 << 32], 0, 8)
    yield "array-of-nothing-huge", _leaf(ARRAY, "|V0", [1 << 60], 0, 0)
    yield "tensor-unknown-type", _leaf(TENSOR, "quaternion128", [1], 0, 16)
    yield "scalar-object", _leaf(SCALAR, "|O", b"12345678")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    valid = _valid()
    for name, payload in [*valid.items(), *_hostile(valid)]:
        (FOLDER / f"{name}.bin").write_bytes(payload)


if __name__ == "__main__":
    main()

"""The wire codec: plain data, arrays and registered types to msgpack payloads and back; never pickle.

What comes back: everything msgpack knows as it was (NaN, infinities, bytes, integer keys, 64-bit integers, its
Timestamp); tuples as lists; bytearrays and memoryviews as bytes; subclasses of dict, list, str, int, float and
bytes as exactly their base (an IntEnum as its int); numpy arrays and scalars as such, in C order; torch tensors as
CPU tensors that own their memory. Anything else is an EncodeError that names the place. Nesting is limited to
msgpack's own 1,024 levels (511 to pack, before msgpack 1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgpack

from .codec_rows import decode_rows, encode_rows
from .codec_wire import (
    ENCODE_FAILURES,
    Buffer,
    Decoder,
    Payload,
    Registration,
    add_registration,
    borrow,
    by_name,
    explain,
    give_back,
    lay_out,
    open_payload,
)
from .errors import ConfigError

__all__ = ["Buffer", "Payload", "decode", "decode_rows", "encode", "encode_rows", "register", "size_of"]

T = TypeVar("T")
_PLAIN = (type(None), bool, int, float, str, bytes, bytearray, memoryview, list, tuple, dict)
_KNOWN = (*_PLAIN, msgpack.ExtType, msgpack.Timestamp)


def encode(value: object, *, where: str = "value") -> list[Buffer]:
    """The payload of `value` as buffers to be written one after the other.

    Buffers may be views of the arrays in `value`: do not change those before the buffers are written.
    Raises EncodeError, whose message starts with `where` and the path inside it.
    """
    encoder = borrow()
    try:
        doc = encoder.pack(value)
    except ENCODE_FAILURES as error:
        raise explain(value, where, error) from None
    buffers = lay_out(encoder, [doc], where)
    give_back(encoder, len(doc))
    return buffers


def decode(payload: Payload, *, writable: bool = False) -> Any:
    """The value of a payload that `encode` wrote; DecodeError for anything else.

    Arrays are read-only views that keep the payload alive; `writable=True` copies them.
    """
    view, doc_end = open_payload(payload)
    return Decoder(view, doc_end, writable=writable).unpack_doc()


def size_of(buffers: Iterable[Buffer]) -> int:
    """How many bytes the buffers have together."""
    return sum(map(len, buffers))


def register(cls: type[T], pack: Callable[[T], Any], unpack: Callable[[Any], T], *, name: str | None = None) -> None:
    """Lets objects of exactly `cls` travel as what `pack` makes of them, on both sides under the same `name`.

    `pack` gives anything the codec carries, `unpack` gets it back. The name is `module.qualname` unless given; give one
    where a module runs as `__main__` on one side. Registering a name again replaces it if it is the same class by name.
    """
    name = name or _full_name(cls)
    if cls in _KNOWN:
        raise ConfigError(f"{cls.__name__} cannot be registered: the codec carries it already; register a subclass")
    previous = by_name.get(name)
    if previous and previous.cls is not cls and _full_name(previous.cls) != _full_name(cls):
        raise ConfigError(f"{name!r} is registered for {_full_name(previous.cls)} already; give another name")
    add_registration(Registration(cls, name, pack, unpack))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

"""Rows of one prompt group, with what they share stored once.

The doc is `["rows", length of shared, shared, rows]`: values that stand in every row at the same place, at the top
or in nested dicts, move to `shared`, and the rows point at them. Rows keep their own keys in their own order, so
missing keys and other orders come back as they were. Values are shared only when they are the same on the wire (1
and True are not), and when they are larger than a pointer. Decoded siblings share immutable leaves (arrays are
read-only), never a container.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from .codec_arrays import kind_of
from .codec_refusals import class_of
from .codec_wire import (
    ENCODE_FAILURES,
    HEAD,
    SHARED,
    Buffer,
    Decoder,
    Encoder,
    ExtType,
    Payload,
    borrow,
    explain,
    give_back,
    lay_out,
    open_payload,
)
from .errors import DecodeError, EncodeError

_NAME = b"\x94\xa4rows"
_POOL_HEAD = struct.Struct(">BIBI")
_MISSING = object()
_WORTH_SHARING = 32
_LARGE = 1 << 16
_DIFFERENT = b"?"
_HOIST_DEPTH = 16
# What a small payload may unfold to, in values; the encoder keeps to it by sharing no more than that.
_MAX_UNFOLDED = 1 << 24
_TINY = frozenset((int, float, bool, type(None)))
_LEAVES = frozenset((int, float, bool, type(None), str, bytes))
# Keys that are the same on the wire where they are equal.
_KEYS = frozenset((int, str, bytes))
_ONLY_TEXTS = {str}
_ONLY_DICTS = {dict}

Row = dict[Any, Any]


def encode_rows(rows: Sequence[Mapping[str, Any]], *, first_row: int) -> list[Buffer]:
    """The payload of a group's rows; an EncodeError names the row by its index in the batch, `first_row` + i."""
    siblings = [_as_dict(row, first_row + index) for index, row in enumerate(rows)]
    encoder = borrow()
    hoister = _Hoister(encoder, len(siblings))
    try:
        doc = encoder.pack(hoister.hoist(siblings))
    except ENCODE_FAILURES as error:
        raise _row_error(siblings, first_row, error) from None
    length = sum(map(len, hoister.pool)) + 5
    where = f"the group of row {first_row}"
    if length >= 1 << 32:
        raise EncodeError(f"{where} shares {length} bytes, and one payload carries less than 4 GiB; send it in parts")
    head = _NAME + _POOL_HEAD.pack(0xCE, length, 0xDD, len(hoister.pool))
    buffers = lay_out(encoder, [head, *hoister.pool, doc], where)
    give_back(encoder, length + len(doc))
    return buffers


def decode_rows(payload: Payload) -> list[Row]:
    """The rows that `encode_rows` wrote; a DecodeError for anything else."""
    view, doc_end = open_payload(payload)
    start = HEAD.size + len(_NAME)
    pool_start = start + 5
    if doc_end < start + _POOL_HEAD.size or bytes(view[HEAD.size : start]) != _NAME:
        raise DecodeError("payload does not hold the rows of a group; read it with decode")
    marker, length, pool_marker, _ = _POOL_HEAD.unpack_from(view, start)
    if (marker, pool_marker) != (0xCE, 0xDD) or pool_start + length > doc_end:
        raise DecodeError("payload holds a group whose shared part is malformed; it was cut or altered")
    decoder = Decoder(view, doc_end)
    pool = decoder.unpack(view[pool_start : pool_start + length])
    if decoder.saw_registered:
        raise DecodeError("payload shares a registered type between rows, which rolloutbus never writes")
    decoder.shared = _Pool(pool).take
    rows = decoder.unpack(view[pool_start + length : doc_end])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in cast("list[Any]", rows)):
        raise DecodeError("payload holds a group that is not a list of rows")
    return cast("list[Row]", rows)


def _as_dict(row: object, index: int) -> Row:
    if type(row) is dict:
        return cast("Row", row)
    if isinstance(row, Mapping):
        return dict(cast("Mapping[Any, Any]", row))
    raise EncodeError(f"row {index} is a {type(row).__name__}, and a row is a dict; convert it to one")


def _row_error(siblings: list[Row], first_row: int, cause: Exception) -> EncodeError:
    for index, row in enumerate(siblings):
        try:
            Encoder().pack(row)
        except ENCODE_FAILURES as error:
            return explain(row, f"row {first_row + index}", error)
    return EncodeError(f"the group of row {first_row} cannot be packed: {cause}")


class _Hoister:
    """Moves what siblings share into a pool of packed values."""

    def __init__(self, encoder: Encoder, siblings: int) -> None:
        self.pool: list[bytes] = []
        self._encoder = encoder
        self._scratch = borrow()
        self._copies = siblings - 1
        self._unfolded = 0

    def hoist(self, siblings: list[Row]) -> list[Row]:
        """The rows, with pointers in place of what all of them share."""
        bodies = self._hoist(siblings, 0) if self._copies > 0 else siblings
        give_back(self._scratch, sum(map(len, self.pool)))
        return bodies

    def _hoist(self, siblings: list[Row], depth: int) -> list[Row]:
        pointers: Row = {}
        inner: dict[Any, list[Row]] = {}
        for key, value in siblings[0].items():
            kind = class_of(value)
            if kind in _TINY or (kind is str and len(value) < _WORTH_SHARING):
                continue
            column = [sibling.get(key, _MISSING) for sibling in siblings]
            same, wire = self._compare(value, column)
            if same:
                pointers[key] = self._pointer(value, wire)
            elif wire and depth < _HOIST_DEPTH and set(map(type, column)) == _ONLY_DICTS:
                inner[key] = self._hoist(column, depth + 1)
        bodies = [{**sibling, **pointers} for sibling in siblings]
        # Written over the pointers' copies, so that a nested dict keeps its place among the row's keys.
        for key, parts in inner.items():
            for body, part in zip(bodies, parts, strict=True):
                body[key] = part
        return bodies

    def _compare(self, first: Any, column: list[Any]) -> tuple[bool, bytes]:
        """Whether the column is one value worth sharing; and what that is on the wire, where it had to be packed."""
        # Texts compare by themselves without being packed; of all other types == would take 1 for True.
        if type(first) is str and set(map(type, column)) == _ONLY_TEXTS:
            return column.count(first) == len(column), b""
        if isinstance(first, dict) and _differs_at_once(cast("Row", first), column[1]):
            return False, _DIFFERENT
        wire = self._wire(first)
        if len(wire) < _WORTH_SHARING or self._scratch.saw_registered:
            return False, b""
        try:
            return all(value is first or self._is(value, first, wire) for value in column), wire
        except RecursionError:
            return False, b""

    def _is(self, value: Any, first: Any, wire: bytes) -> bool:
        if value is _MISSING:
            return False
        return self._wire(value) == wire if len(wire) < _LARGE else self._same(value, first)

    def _same(self, a: Any, b: Any) -> bool:
        """Whether both are the same on the wire, without packing the large texts in them."""
        kind = class_of(a)
        if a is b or kind is not type(b):
            return a is b
        if kind is str or kind is bytes:
            return a == b
        if kind is dict:
            return _same_keys(a, b) and all(map(self._same, a.values(), b.values()))
        if (kind is list or kind is tuple) and not (a and type(a[0]) in _TINY):
            return len(a) == len(b) and all(map(self._same, a, b))
        return self._wire(a) == self._wire(b)

    def _wire(self, value: Any) -> bytes:
        scratch = self._scratch
        doc = scratch.pack(value)
        if not scratch.size:
            return doc
        wire = b"".join((doc, *scratch.views))
        scratch.reset_tail()
        return wire

    def _pointer(self, value: Any, wire: bytes) -> Any:
        mark = self._encoder.mark()
        doc = self._encoder.pack(value)
        if not self._may_unfold(value, len(wire)):
            self._encoder.back_to(mark)
            return value
        index = len(self.pool)
        self.pool.append(doc)
        return ExtType(SHARED, bytes((index,)) if index < 256 else index.to_bytes(4, "big"))

    def _may_unfold(self, value: Any, size: int) -> bool:
        # Every value takes at least a byte and is counted at most three times, so this is never too small.
        bound = 3 * size * self._copies
        if self._unfolded + bound > _MAX_UNFOLDED:
            bound = _survey(value, set()) * self._copies
        if self._unfolded + bound > _MAX_UNFOLDED:
            return False
        self._unfolded += bound
        return True


def _differs_at_once(first: Row, second: Any) -> bool:
    """Spares packing a whole dict where a glance at its numbers tells that it differs."""
    if type(second) is not dict or len(first) != len(cast("Row", second)):
        return True
    for key, value in first.items():
        if type(value) in _TINY:
            other = cast("Row", second).get(key, _MISSING)
            if type(other) is not type(value) or other != value:
                return True
    return False


def _same_keys(keys: Row, others: Row) -> bool:
    return len(keys) == len(others) and all(
        one is other or (type(one) is type(other) and type(one) in _KEYS and one == other)
        for one, other in zip(keys, others, strict=True)
    )


class _Pool:
    """Hands out the shared values: the first taker gets the value itself, every other one a copy of its containers."""

    def __init__(self, values: Any) -> None:
        if not isinstance(values, list):
            raise DecodeError("payload holds a group whose shared part is not a list")
        self._values = cast("list[Any]", values)
        self._sizes: dict[int, int] = {}
        self._branching: set[int] = set()
        self._budget = _MAX_UNFOLDED

    def take(self, pointer: bytes) -> Any:
        """The value that `pointer` names."""
        index = int.from_bytes(pointer, "big")
        if index >= len(self._values):
            raise DecodeError("payload holds a group whose rows point at a shared value that is not there")
        value = self._values[index]
        # A leaf cannot be changed, so one object serves all rows.
        if type(value) in _LEAVES:
            return value
        size = self._sizes.get(index)
        if size is None:
            self._sizes[index] = _survey(value, self._branching)
            return value
        self._budget -= size
        if self._budget < 0:
            raise DecodeError(f"payload holds a group that unfolds to more than {_MAX_UNFOLDED} values")
        return _copied(value, self._branching)


def _survey(value: Any, branching: set[int]) -> int:
    """How many values a copy of `value` allocates; adds the containers that hold containers to `branching`, by id."""
    size = 0
    stack = [value]
    while stack:
        node = stack.pop()
        children = _children(node)
        if children is None:
            size += node.nbytes // 8 + 1 if kind_of(class_of(node)) == "tensor" else 0
            continue
        size += 2 * len(node) + 1
        inner = [child for child in children if type(child) not in _LEAVES]
        if inner:
            branching.add(id(node))
            stack += inner
    return size


def _children(node: Any) -> Iterable[Any] | None:
    if isinstance(node, dict):
        return cast("Row", node).values()
    return cast("Sequence[Any]", node) if isinstance(node, (list, tuple)) else None


def _copied(value: Any, branching: set[int]) -> Any:
    root = _shallow(value)
    stack = [(root, value)]
    while stack:
        copy, original = stack.pop()
        if id(original) not in branching:
            continue
        places = cast(
            "Iterable[tuple[Any, Any]]", original.items() if class_of(original) is dict else enumerate(original)
        )
        for place, child in places:
            if type(child) not in _LEAVES:
                copy[place] = fresh = _shallow(child)
                stack.append((fresh, child))
    return root


def _shallow(value: Any) -> Any:
    kind = class_of(value)
    if kind is dict or kind is list:
        return value.copy()
    return value.clone() if kind_of(kind) == "tensor" else value

"""Reading replies off a connection: hiredis for what is small, straight into its final place for what is large.

hiredis copies every byte twice, into its buffer and out of it. A reply of large entries is taken apart here instead: a
bulk string of LARGE bytes or more gets memory of its own, and the socket writes into that.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Final

import hiredis

LARGE: Final = 16 * 1024
# Between two large strings stand a few short ones; what of the next large one is read with them is copied once more.
_BETWEEN: Final = 4 * 1024
_SPACE: Final = 1 << 20
# The server's own limit for one string is half of it.
_LARGEST: Final = 1 << 30
_MOST_NESTED: Final = 16
POOL_BYTES: Final = 16 << 20
_GRAIN: Final = 64 * 1024
# Those looked at first were used longest ago.
_LOOKED_AT: Final = 8
# Fewer strings than that are read one by one.
_WORTH_SPLITTING: Final = 4
_LENGTHS: Final = [b"$%d" % size for size in range(_BETWEEN + 1)]

NOTHING: Final = object()


class ReplyError(Exception):
    """An error reply, as it stands in a list of replies; never raised out of this package as it is."""


class SmallReplies:
    """Any reply, by hiredis."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(protocolError=ReplyError, replyError=ReplyError, notEnoughData=NOTHING)
        # By default the parser gives its buffer back after each large reply, and pays for new pages with the next one.
        self._reader.setmaxbuf(0)
        self._space = memoryview(bytearray(_SPACE))

    def space(self) -> memoryview:
        """Where to put the next bytes from the connection."""
        return self._space

    def received(self, count: int) -> None:
        """So many bytes stand in `space` now."""
        self._reader.feed(self._space[:count])  # pyright: ignore[reportArgumentType]

    def next(self) -> Any:
        """The next whole reply, or NOTHING; raises `ReplyError` for what is no reply."""
        return self._reader.gets()


class Pool:
    """Memory for large strings, used again when nobody holds anything of what stood in it.

    New memory costs as much as receiving into it: the system gives it page by page. At most POOL_BYTES are kept.
    """

    def __init__(self) -> None:
        self._kept: deque[bytearray] = deque()
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """`size` bytes, with whatever stood there before."""
        rounded = -(-size // _GRAIN) * _GRAIN
        for _ in range(min(_LOOKED_AT, len(self._kept))):
            self._kept.rotate(-1)
            # Not a much larger one: whoever keeps an array keeps all of it.
            length = len(self._kept[-1])
            if rounded <= length <= rounded + rounded // 4 and _is_free(self._kept):
                return memoryview(self._kept[-1])[:size]
        buffer = bytearray(rounded)
        self._keep(buffer)
        return memoryview(buffer)[:size]

    def _keep(self, buffer: bytearray) -> None:
        self._kept.append(buffer)
        self.kept_bytes += len(buffer)
        while self.kept_bytes > POOL_BYTES:
            self.kept_bytes -= len(self._kept.popleft())


def _is_free(kept: deque[bytearray]) -> bool:
    """Whether nobody else holds the last one of `kept`, or a view of it."""
    # Python lets a bytearray change its size only while no view of it exists; and whoever points into it without, as
    # numpy can, has a reference at least.
    if _references(kept) != _REFERENCES_WHEN_FREE:
        return False
    try:
        kept[-1].pop()
    except BufferError:
        return False
    kept[-1].append(0)
    return True


def _references(kept: deque[bytearray]) -> int:
    return sys.getrefcount(kept[-1])


_REFERENCES_WHEN_FREE = _references(deque([bytearray(1)]))


class LargeReplies:
    """Replies of large bulk strings, which come as `memoryview`; short ones as `bytes`."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._buffer = bytearray(_SPACE)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._between = _SPACE
        self._saw_large = False
        # The bulk string under way, with its line's end, and how much of it is there.
        self._bulk: memoryview | None = None
        self._filled = 0
        # Arrays under way: what they hold so far, and how many elements they lack.
        self._arrays: list[tuple[list[Any], int]] = []

    def space(self) -> memoryview:
        """Where to put the next bytes from the connection."""
        if self._bulk is not None:
            return self._bulk[self._filled :]
        if self._start:
            left = self._view[self._start : self._end]
            self._view[: len(left)] = bytes(left)
            self._start, self._end = 0, len(left)
        return self._view[self._end : self._end + self._between]

    def received(self, count: int) -> None:
        """So many bytes stand in `space` now."""
        if self._bulk is not None:
            self._filled += count
        else:
            self._end += count

    def next(self) -> Any:
        """The next whole reply, or NOTHING; raises `ReplyError` for what is no reply."""
        while (value := self._element()) is not NOTHING:
            while self._arrays:
                items, lacking = self._arrays.pop()
                items.append(value)
                if lacking > 1:
                    self._arrays.append((items, lacking - 1 - self._short_strings(items, lacking - 2)))
                    break
                value = items
            else:
                self._between, self._saw_large = _BETWEEN if self._saw_large else _SPACE, False
                return value
        return NOTHING

    def _element(self) -> Any:
        """The next value that is no array, or an array without elements."""
        while True:
            if self._bulk is not None:
                return self._whole_bulk(self._bulk)
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end < 0:
                if self._end - self._start > LARGE:
                    raise ReplyError("a line without an end")
                return NOTHING
            kind, word = self._buffer[self._start], bytes(self._view[self._start + 1 : end])
            if kind == 0x24:  # $
                return self._bulk_string(_number(word), end + 2)
            self._start = end + 2
            if kind == 0x2A:  # *
                if (count := _number(word)) <= 0:
                    return None if count else []
                if len(self._arrays) == _MOST_NESTED:
                    raise ReplyError("arrays nested deeper than any reply")
                self._arrays.append(([], count))
                continue
            return _line(kind, word)

    def _short_strings(self, items: list[Any], most: int) -> int:
        """Append up to `most` short strings that are there whole, all in one go; gives how many."""
        if most < _WORTH_SPLITTING or self._bulk is not None:
            return 0
        # Lengths and strings in turns, and at the end what is not known to be whole.
        lines = bytes(self._view[self._start : min(self._end, self._start + _BETWEEN)]).split(b"\r\n", 2 * most)
        words: list[bytes] = []
        for length, word in zip(lines[0:-1:2], lines[1:-1:2], strict=False):
            # Something else, or a string with a line's end in it.
            if length != _LENGTHS[len(word)]:
                break
            words.append(word)
        self._start += sum(map(len, lines[: 2 * len(words)])) + 4 * len(words)
        items += words
        return len(words)

    def _bulk_string(self, size: int, start: int) -> Any:
        if size < 0:
            self._start = start
            return None
        end = start + size
        if size < LARGE:
            if end + 2 > self._end:
                return NOTHING
            self._start = end + 2
            return bytes(self._view[start:end])
        if size > _LARGEST:
            raise ReplyError(f"a string of {size} bytes")
        self._bulk = self._pool.take(size + 2)
        self._between, self._saw_large = _BETWEEN, True
        self._filled = min(self._end - start, size + 2)
        self._bulk[: self._filled] = self._view[start : start + self._filled]
        self._start = start + self._filled
        return self._whole_bulk(self._bulk)

    def _whole_bulk(self, bulk: memoryview) -> Any:
        if self._filled < len(bulk):
            return NOTHING
        self._bulk = None
        return bulk[:-2]


def _number(word: bytes) -> int:
    try:
        return int(word)
    except ValueError:
        raise ReplyError(f"{word[:40]!r} where a length belongs") from None


def _line(kind: int, word: bytes) -> Any:
    if kind == 0x3A:  # :
        return _number(word)
    if kind == 0x2B:  # +
        return word
    if kind == 0x2D:  # -
        return ReplyError(word.decode(errors="replace"))
    raise ReplyError(f"{chr(kind)!r} where a reply begins")

"""Replies as they come off a connection, in whatever pieces: the reader of large strings says what hiredis says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker.codec import decode, encode
from rolloutbus.broker.replies import LARGE, NOTHING, POOL_BYTES, LargeReplies, Pool, ReplyError, SmallReplies

# Its stubs leave much unknown.
numpy: Any = importlib.import_module("numpy")
Reader = SmallReplies | LargeReplies


def read(reader: Reader, wire: bytes, pieces: list[int]) -> list[Any]:
    """All replies in `wire`, received in `pieces` of so many bytes, over and over."""
    found: list[Any] = []
    at, turn = 0, 0
    while at < len(wire):
        space = reader.space()
        count = min(pieces[turn % len(pieces)], len(space), len(wire) - at)
        space[:count] = wire[at : at + count]
        at, turn = at + count, turn + 1
        reader.received(count)
        while (reply := reader.next()) is not NOTHING:
            found.append(reply)
    return found


def plain(reply: Any) -> Any:
    if isinstance(reply, list):
        return [plain(item) for item in cast("list[Any]", reply)]
    if isinstance(reply, ReplyError):
        return f"error {reply}"
    return cast("memoryview", reply).tobytes() if isinstance(reply, memoryview) else reply


def bulk(body: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(body), body)


def array(items: list[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(items), b"".join(items))


# As an entry's fields: many short strings, some of which look like the protocol itself.
FIELDS = st.lists(
    st.one_of(
        st.text("$*:0123\r\n", max_size=12).map(lambda text: bulk(text.encode())),
        st.sampled_from([bulk(b"kind"), bulk(bytes(5000)), b"$-1\r\n", b":1\r\n", b"$0\r\n\r\n"]),
    ),
    min_size=1,
    max_size=24,
)
LEAVES = st.one_of(
    st.binary(max_size=40).map(bulk),
    FIELDS.map(array),
    st.integers(0, 3 * LARGE).map(lambda size: bulk(b"\r\n$*" * (size // 4))),
    st.integers(-5, 2**40).map(lambda number: b":%d\r\n" % number),
    st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"$0\r\n\r\n", b"+OK\r\n", b"-ERR no\r\n"]),
)
REPLIES = st.lists(
    st.recursive(LEAVES, lambda inner: st.lists(inner, min_size=1, max_size=4).map(array), max_leaves=12)
)


@given(REPLIES, st.lists(st.integers(1, LARGE), min_size=1, max_size=5))
def test_replies_are_the_same_by_either_reader_in_whatever_pieces(replies: list[bytes], pieces: list[int]) -> None:
    wire = b"".join(replies)
    small = plain(read(SmallReplies(), wire, [1 << 20]))
    assert plain(read(LargeReplies(), wire, pieces)) == small
    assert len(small) == len(replies)


def test_a_large_string_is_received_where_it_stays() -> None:
    """Once its length is known the socket writes into the string's own memory; nothing else is asked for before."""
    reader, size = LargeReplies(), 4 * LARGE
    head = b"*1\r\n$%d\r\n" % size
    reader.space()[: len(head)] = head
    reader.received(len(head))
    assert reader.next() is NOTHING
    space = reader.space()
    assert space.nbytes == size + 2
    space[:] = bytes(size) + b"\r\n"
    reader.received(size + 2)
    value: memoryview = reader.next()[0]
    assert value.obj is space.obj
    assert value.nbytes == size


@pytest.mark.parametrize(
    "wire",
    [b"?what\r\n", b"$x\r\n", b"*1x\r\n", b":1.5\r\n", b"x" * (LARGE + 1), b"$99999999999\r\n", b"*1\r\n" * 20],
    ids=["kind", "length", "count", "number", "endless line", "endless string", "nested"],
)
def test_what_is_no_reply_is_an_error(wire: bytes) -> None:
    with pytest.raises(ReplyError):
        read(LargeReplies(), wire, [1 << 20])


def test_memory_is_used_again_only_when_nobody_holds_anything_in_it() -> None:
    """A trainer may keep one array of a row for as long as it likes."""
    pool = Pool()
    first = pool.take(LARGE)
    first[:] = bytes([7]) * LARGE
    memory = id(first.obj)
    kept = first[8:24]
    del first
    others = [pool.take(LARGE) for _ in range(20)]
    assert all(id(other.obj) != memory for other in others)
    assert kept.tolist() == [7] * 16
    del kept, others
    assert any(id(pool.take(LARGE).obj) == memory for _ in range(30))


HOLDERS: dict[str, Callable[[memoryview], Any]] = {
    "frombuffer": lambda view: numpy.frombuffer(view, dtype="u1"),
    # numpy looks through the view at what it is of, and asks that for no view.
    "ndarray": lambda view: numpy.ndarray((len(view),), "u1", view),
    "array of an array": lambda view: numpy.ndarray((len(view),), "u1", view)[3:][::2],
    "view of an array": lambda view: memoryview(numpy.frombuffer(view, dtype="u1"))[1:],
    "codec": lambda view: decode(view)["array"],
    "codec, writable": lambda view: decode(view, writable=True)["array"],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_was_handed_out_never_changes(hold: Callable[[memoryview], Any]) -> None:
    """An array that numpy made over a view forgot the view, its memory was taken for free, and the next batch was
    received into the results of the last.
    """
    payload = b"".join(encode({"array": numpy.arange(LARGE)}))
    pool = Pool()
    view = pool.take(len(payload))
    view[:] = payload
    held = hold(view.toreadonly())
    before = bytes(held)
    del view
    for _ in range(20):
        pool.take(len(payload))[:] = b"\x11" * len(payload)
    assert bytes(held) == before


def test_no_more_memory_is_kept_than_the_bound() -> None:
    pool = Pool()
    for _ in range(3 * POOL_BYTES // (1 << 20)):
        pool.take(1 << 20)
    held = [pool.take(1 << 20) for _ in range(3 * POOL_BYTES // (1 << 20))]
    assert len({id(view.obj) for view in held}) == len(held)
    assert pool.kept_bytes <= POOL_BYTES


@given(st.lists(st.tuples(st.integers(1, 4 * LARGE), st.booleans()), max_size=60))
def test_what_is_held_never_changes_whatever_else_is_taken(takes: list[tuple[int, bool]]) -> None:
    pool = Pool()
    held: list[tuple[memoryview, int]] = []
    for number, (size, keep) in enumerate(takes):
        view = pool.take(size)
        assert view.nbytes == size
        view[:] = bytes([number]) * size
        if keep:
            held.append((view, number))
        del view
    assert all(view.tobytes() == bytes([number]) * view.nbytes for view, number in held)

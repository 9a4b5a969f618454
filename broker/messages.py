"""What stands on the streams, as plain values: groups on the way out, rows, failures and notices on the way back.

Every entry has plain-text fields that redis-cli shows and at most one binary field, `payload`. A foreign or broken
entry gives a `ForeignEntryError`, never half a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from . import codec
from .channel import Arg, Buffer, Payload
from .errors import DecodeError, RolloutBusError

# Far more than any prompt group has; a number from a stranger must not become memory.
_MOST_ROWS = 1 << 20


class ForeignEntryError(RolloutBusError, ValueError):
    """An entry that no rolloutbus process wrote, or that somebody changed."""


class GroupEntry(NamedTuple):
    """A prompt group as a worker reads it: `rows` rows, the first of which has `_rowidx` `first_row`."""

    entry: str
    batch: str
    group: int
    client: str
    route: str
    rows: int
    first_row: int
    payload: bytes


class ResultEntry(NamedTuple):
    """What came back for one group: rows (`kind` "rows"), its failure ("failed"), or a notice ("cancelled")."""

    entry: str
    kind: str
    batch: str
    group: int
    row_indices: tuple[int, ...]
    attempt: int
    instance: str
    timing: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed, all plain data. `failure_class` is "infra" (worth another place) or "data"."""

    failure_class: str
    type: str
    message: str
    traceback: str = ""
    instance: str = ""
    attempt: int = 0
    http_status: int | None = None

    def packed(self) -> bytes:
        return b"".join(codec.encode(asdict(self), where="failure"))

    @classmethod
    def unpacked(cls, payload: bytes) -> Failure:
        """The failure in `payload`; what only a newer version knows is left out. Never raises: the group failed,
        whatever is to be read.
        """
        try:
            words = codec.decode(payload)
            return cls(**{name: words[name] for name in cls.__dataclass_fields__ if name in words})
        except (DecodeError, TypeError) as error:
            return cls("data", "UnreadableFailure", f"the group failed, and the account of it cannot be read ({error})")


@dataclass(frozen=True, slots=True)
class ReplayOrigin:
    """What a group that runs again was when it was first buried, and how often it has run again since: `replays` is 1
    for the first time.

    Its fields stand beside a group's own, each as `origin_…`, and whoever buries a group keeps all fields.
    """

    batch: str
    group: int
    client: str
    first_row: int
    letter: str
    replays: int

    @property
    def group_id(self) -> str:
        return f"{self.batch}:{self.group}"


def origin_fields(origin: ReplayOrigin | None) -> tuple[Arg, ...]:
    """Fields and values that say where a group comes from; none for one that was not replayed."""
    if origin is None:
        return ()
    return tuple(word for name, value in asdict(origin).items() for word in (f"origin_{name}", value))


def group_fields(
    batch: str,
    group: int,
    client: str,
    route: str,
    rows: int,
    first_row: int,
    payload: Payload,
    origin: ReplayOrigin | None = None,
) -> tuple[Arg, ...]:
    """Fields and values of a group's entry."""
    return (
        "kind", "group", "batch", batch, "group", group, "client", client, "route", route, "rows", rows,
        "first_row", first_row, *origin_fields(origin), "payload", payload,
    )  # fmt: skip


def row_fields(
    group: GroupEntry, positions: Sequence[int], attempt: int, instance: str, timing: str, payload: Payload
) -> tuple[Arg, ...]:
    """Fields and values of an entry that carries finished rows of one group."""
    row_indices = ",".join([str(group.first_row + at) for at in positions])
    return (
        "kind", "rows", "batch", group.batch, "group", group.group, "route", group.route, "row_indices", row_indices,
        "attempt", attempt, "instance", instance, "timing", timing, "payload", payload,
    )  # fmt: skip


def parse_group(entry: bytes, fields: Sequence[bytes] | None) -> GroupEntry:
    """A groups stream's entry; raises `ForeignEntryError` naming the field that is missing or wrong."""
    words = _words(fields)
    try:
        if words[b"kind"] != b"group":
            raise ForeignEntryError(f"entry {entry.decode()} on a groups stream has kind {words[b'kind']!r}")
        return GroupEntry(
            entry.decode(), words[b"batch"].decode(), int(words[b"group"]), words[b"client"].decode(),
            words[b"route"].decode(), int(words[b"rows"]), int(words[b"first_row"]), words[b"payload"],
        )  # fmt: skip
    except ForeignEntryError:
        raise
    except (KeyError, ValueError) as error:
        raise ForeignEntryError(f"entry {entry.decode()} on a groups stream is none of ours ({error!r})") from None


def parse_result(entry: bytes, fields: Sequence[bytes] | None) -> ResultEntry:
    """A results stream's entry; raises `ForeignEntryError` naming the field that is missing or wrong."""
    words = _words(fields)
    try:
        kind = words[b"kind"].decode()
        if kind == "cancelled":
            return ResultEntry(
                entry.decode(), kind, words[b"batch"].decode(), -1, (), 0, "", "", words.get(b"reason", b"")
            )
        if kind == "failed":
            first, count = int(words[b"first_row"]), int(words[b"rows"])
            if not 0 < count <= _MOST_ROWS:
                raise ForeignEntryError(
                    f"entry {entry.decode()} on a results stream says that a group has {count} rows"
                )
            indices = tuple(range(first, first + count))
        elif kind == "rows":
            indices = tuple([int(word) for word in words[b"row_indices"].split(b",")])
        else:
            raise ForeignEntryError(f"entry {entry.decode()} on a results stream has kind {kind!r}")
        return ResultEntry(
            entry.decode(), kind, words[b"batch"].decode(), int(words[b"group"]), indices, int(words[b"attempt"]),
            words[b"instance"].decode(), words.get(b"timing", b"").decode(), words[b"payload"],
        )  # fmt: skip
    except ForeignEntryError:
        raise
    except (KeyError, ValueError) as error:
        raise ForeignEntryError(f"entry {entry.decode()} on a results stream is none of ours ({error!r})") from None


def _words(fields: Sequence[bytes] | None) -> Mapping[bytes, bytes]:
    if not fields or len(fields) % 2:
        return {}
    # What is large comes as a view, which only the payload may be.
    names = map(bytes, fields[::2])
    return {
        name: value if name == b"payload" else bytes(value) for name, value in zip(names, fields[1::2], strict=True)
    }


# Several rows share an entry: a msgpack array of alternating padding and row payload, so that arrays inside stay
# aligned.
_ALIGN = 16
_PADDINGS = [b"\xc4" + bytes([pad]) + bytes(pad) + b"\xc6" for pad in range(_ALIGN)]


def frame(payloads: Sequence[Payload]) -> Payload:
    """Row payloads as one payload, without joining large buffers."""
    out: list[Buffer] = [b"\xdd" + (2 * len(payloads)).to_bytes(4, "big")]
    offset = 5
    for payload in payloads:
        pad = -(offset + 7) % _ALIGN
        out.append(_PADDINGS[pad] + payload.size.to_bytes(4, "big"))
        out.extend(payload.buffers)
        offset += 7 + pad + payload.size
    return Payload(out, offset)


def unframe(payload: bytes) -> list[memoryview]:
    """The row payloads of an entry, as views; raises `ForeignEntryError` where the framing is broken."""
    view, out, offset = memoryview(payload).toreadonly(), list[memoryview](), 5
    if len(payload) < offset or payload[0] != 0xDD:
        raise ForeignEntryError("a results payload does not begin as one")
    for _ in range(int.from_bytes(view[1:5], "big") // 2):
        if offset + 2 > len(payload):
            raise ForeignEntryError("a results payload is cut short")
        start = offset + 2 + payload[offset + 1] + 5
        size = int.from_bytes(view[start - 4 : start], "big")
        if start + size > len(payload):
            raise ForeignEntryError("a results payload is cut short")
        if payload[offset] != 0xC4 or payload[start - 5] != 0xC6:
            raise ForeignEntryError("a results payload is not framed as one")
        out.append(view[start : start + size])
        offset = start + size
    if offset != len(payload):
        raise ForeignEntryError("a results payload goes on after its last row")
    return out

"""One group's life as the broker knows it: what happened to it in order, where it stands, and how it was buried.

It comes from the capped `events` stream, the batch's record and the dead letters; `trimmed` says when its beginning is
lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .dead_letters import DeadLetter, read_dead_letters
from .errors import UnknownBatchError
from .group_record import GroupRecord, parse_group_record
from .inspection import decoded
from .keys import GROUP_NAME, Keys
from .steps import Runner, ask

_PAGE = 2000


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """One thing that happened: published, taken, accepted, finished, lost, refused, retry, released, found, dead."""

    at_ms: int
    kind: str
    attempt: int
    instance: str
    detail: str


@dataclass(frozen=True, slots=True)
class GroupLife:
    """`record` is None once the batch is over, and where it is none of ours: then it is `unreadable`. `trimmed` when
    events from its beginning are gone, `events_since_ms` where they begin.
    """

    batch: str
    group: int
    now_ms: int
    events: tuple[GroupEvent, ...]
    record: GroupRecord | None
    batch_state: str
    letter: DeadLetter | None
    trimmed: bool
    events_since_ms: int
    unreadable: bool = False


async def read_group_life(runner: Runner, keys: Keys, batch: str, group: int) -> GroupLife:
    """Everything known of the group; raises `UnknownBatchError` when that is nothing."""
    time, fields = await ask(runner, [("TIME",), ("HMGET", keys.batch(batch), "state", f"g:{group}", "shards")])
    state, shards = (word.decode(errors="replace") if word else "" for word in (fields[0], fields[2]))
    raw: bytes = fields[1] or b""
    events, since = await _read_events(runner, keys, batch, group)
    letters = [
        letter for letter in await read_dead_letters(runner, keys) if (letter.batch, letter.group) == (batch, group)
    ]
    record = await _read_record(runner, keys, raw, shards.split()) if raw else None
    if not (events or raw or letters):
        raise UnknownBatchError(
            f"nothing is known of group {group} of batch {batch!r} in run {keys.run!r}: no event, no record, no dead "
            "letter; `rolloutbus status` lists open batches, and events of old ones are trimmed"
        )
    return GroupLife(
        batch=batch,
        group=group,
        now_ms=int(time[0]) * 1000 + int(time[1]) // 1000,
        events=tuple(events),
        record=record,
        batch_state=state,
        letter=letters[-1] if letters else None,
        trimmed=not any(event.kind == "published" for event in events),
        events_since_ms=since,
        unreadable=bool(raw) and record is None,
    )


async def _read_events(runner: Runner, keys: Keys, batch: str, group: int) -> tuple[list[GroupEvent], int]:
    """The group's events, oldest first, and the time of the oldest event of any group."""
    events: list[GroupEvent] = []
    start, since = "-", 0
    while True:
        page = (await ask(runner, [("XRANGE", keys.events, start, "+", "COUNT", _PAGE)]))[0]
        for entry, flat in page:
            at_ms = int(entry.partition(b"-")[0])
            since = since or at_ms
            fields = decoded(flat)
            if fields.get("batch") == batch and fields.get("group") == str(group):
                events.append(_event(at_ms, fields))
        if len(page) < _PAGE:
            return events, since
        start = f"({page[-1][0].decode()}"


def _event(at_ms: int, fields: Mapping[str, str]) -> GroupEvent:
    attempt = fields.get("attempt", "")
    number = int(attempt) if attempt.isdecimal() else 0
    return GroupEvent(at_ms, fields.get("kind", ""), number, fields.get("instance", ""), fields.get("detail", ""))


async def _read_record(runner: Runner, keys: Keys, raw: bytes, shards: Sequence[str]) -> GroupRecord | None:
    record = parse_group_record(raw)
    if record is None or record.status != "running":
        return record
    return replace(record, idle_s=await _idle_s(runner, keys, record.entry, shards))


async def _idle_s(runner: Runner, keys: Keys, entry: str, shards: Sequence[str]) -> float | None:
    for shard in shards:
        if (await ask(runner, [("EXISTS", keys.groups(shard))]))[0]:
            held = (await ask(runner, [("XPENDING", keys.groups(shard), GROUP_NAME, entry, entry, 1)]))[0]
            if held:
                return held[0][2] / 1000
    return None

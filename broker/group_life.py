"""One group's life as the broker knows it: what happened to it in order, where it stands, and how it was buried.

It comes from the capped `events` stream, the batch's record and the dead letters; `trimmed` says when its beginning is
lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .dead_letters import DeadLetter, read_dead_letters
from .errors import UnknownBatchError
from .group_record import ENDED, GroupRecord, parse_group_record
from .inspection import decoded, scan
from .keys import GROUP_NAME, Keys
from .shard_records import parse_record, shard_of_label
from .steps import Runner, ask

_PAGE = 2000


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """One thing that happened, of a kind that a transition notes; docs/looking.md has them all."""

    at_ms: int
    kind: str
    attempt: int
    instance: str
    detail: str


@dataclass(frozen=True, slots=True)
class GroupLife:
    """`record` is None once the batch is over, and where it is none of ours: then it is `unreadable`. `trimmed` when
    events from its beginning are gone, `events_since_ms` where they begin.

    Of a group that was taken and has not ended: `shard`, its `commit` and `group_timeout_s` where the shard has a
    record, and `deadline_ms`; of one that runs, `attempt_since_ms` where that event is still there. `rows` of the
    group, 0 where that is not known.
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
    batch_reason: str = ""
    rows: int = 0
    shard: str = ""
    commit: str | None = None
    group_timeout_s: float | None = None
    deadline_ms: int | None = None
    attempt_since_ms: int | None = None


async def read_group_life(runner: Runner, keys: Keys, batch: str, group: int) -> GroupLife:
    """Everything known of the group; raises `UnknownBatchError` when that is nothing."""
    names = (f"g:{group}", "state", "reason", "group_size")
    time, fields = await ask(runner, [("TIME",), ("HMGET", keys.batch(batch), *names)])
    raw: bytes = fields[0] or b""
    state, reason, size = (word.decode(errors="replace") if word else "" for word in fields[1:])
    events, since = await _read_events(runner, keys, batch, group)
    letters = [
        letter for letter in await read_dead_letters(runner, keys) if (letter.batch, letter.group) == (batch, group)
    ]
    record = await _read_record(runner, keys, raw) if raw else None
    if not (events or raw or letters):
        raise UnknownBatchError(
            f"nothing is known of group {group} of batch {batch!r} in run {keys.run!r}: no event, no record, no dead "
            "letter; `rolloutbus status` lists open batches, and events of old ones are trimmed"
        )
    life = GroupLife(
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
        batch_reason=reason,
        rows=int(size) if size.isdecimal() else 0,
        attempt_since_ms=_attempt_since(events, record),
    )
    return await _with_deadline(runner, keys, life)


def _attempt_since(events: Sequence[GroupEvent], record: GroupRecord | None) -> int | None:
    if record is None or record.status != "running":
        return None
    taken = (event.at_ms for event in events if (event.kind, event.attempt) == ("taken", record.attempt))
    return next(taken, None)


async def _with_deadline(runner: Runner, keys: Keys, life: GroupLife) -> GroupLife:
    record = life.record
    if record is None or record.status in ENDED or not record.first_take_ms:
        return life
    shard = shard_of_label(record.instance)
    of_shard = parse_record((await ask(runner, [("HGET", keys.shards, shard)]))[0])
    if of_shard is None:
        return replace(life, shard=shard)
    deadline_ms = record.first_take_ms + int(of_shard.group_timeout_s * 1000)
    return replace(
        life, shard=shard, commit=of_shard.commit, group_timeout_s=of_shard.group_timeout_s, deadline_ms=deadline_ms
    )


async def known_batches(runner: Runner, keys: Keys) -> set[str]:
    """Ids of all batches of which the broker knows anything: a record, an event, a dead letter."""
    known = await batches_there(runner, keys)
    known |= {letter.batch for letter in await read_dead_letters(runner, keys)}
    async for _, fields in _all_events(runner, keys):
        known.add(fields.get("batch", "-"))
    # What happened to an instance, or came from a stranger, stands there without a batch.
    return known - {"-"}


async def batches_there(runner: Runner, keys: Keys) -> set[str]:
    """Ids of the batches that have a record on the broker."""
    return {name.removeprefix(keys.batch("")) for name in await scan(runner, keys.batch("*"))}


async def _read_events(runner: Runner, keys: Keys, batch: str, group: int) -> tuple[list[GroupEvent], int]:
    """The group's events, oldest first, and the time of the oldest event of any group."""
    events: list[GroupEvent] = []
    since = 0
    async for at_ms, fields in _all_events(runner, keys):
        since = since or at_ms
        if fields.get("batch") == batch and fields.get("group") == str(group):
            events.append(_event(at_ms, fields))
    return events, since


async def _all_events(runner: Runner, keys: Keys) -> AsyncIterator[tuple[int, dict[str, str]]]:
    """When, and the fields, of every event that is kept, oldest first."""
    start = "-"
    while True:
        page: list[Any] = (await ask(runner, [("XRANGE", keys.events, start, "+", "COUNT", _PAGE)]))[0]
        for entry, flat in page:
            yield int(entry.partition(b"-")[0]), decoded(flat)
        if len(page) < _PAGE:
            return
        start = f"({page[-1][0].decode()}"


def _event(at_ms: int, fields: Mapping[str, str]) -> GroupEvent:
    attempt = fields.get("attempt", "")
    number = int(attempt) if attempt.isdecimal() else 0
    return GroupEvent(at_ms, fields.get("kind", ""), number, fields.get("instance", ""), fields.get("detail", ""))


async def _read_record(runner: Runner, keys: Keys, raw: bytes) -> GroupRecord | None:
    record = parse_group_record(raw)
    if record is None or record.status != "running":
        return record
    return replace(record, idle_s=await _idle_s(runner, keys, record))


async def _idle_s(runner: Runner, keys: Keys, record: GroupRecord) -> float | None:
    stream = keys.groups(shard_of_label(record.instance))
    if not (await ask(runner, [("EXISTS", stream)]))[0]:
        return None
    held = (await ask(runner, [("XPENDING", stream, GROUP_NAME, record.entry, record.entry, 1)]))[0]
    return held[0][2] / 1000 if held else None

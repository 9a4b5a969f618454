"""Looking after what a batch waits for: deadlines, shards without an instance, groups that vanished, and a word about
each stall.

No wait is silent or endless: every group that is still out is either running under a lease, due at a known time, or
ended here with a reason. Absence counts only while this process was connected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..broker.channel import Link, Payload
from ..broker.client_transitions import ClientTransitions, OutgoingGroup
from ..broker.errors import NoInstanceError, UnknownBatchError
from ..broker.group_record import ENDED, WAITING, parse_group_record
from ..broker.keys import Keys
from ..broker.messages import Failure, ForeignEntryError
from ..broker.settings import BrokerSettings
from ..broker.shard_records import ShardRecord, parse_record
from ..broker.steps import ask
from ..broker.wording import counted
from .collection import BatchCollection

log = logging.getLogger("rolloutbus.collector")

_SHOWN = 5
_DOUBTED_AT_ONCE = 64
# After so many sweeps' time without a look, nothing is known of what was in between.
_LOOKS_MISSED = 3


ABANDONED = Failure(
    "infra",
    "AbandonedError",
    "the workers dropped it, because its client stayed away for longer than abandon_after_s; publish it again",
)


class GroupState(NamedTuple):
    """One group's record on the broker."""

    group: int
    status: str
    attempt: int
    instance: str
    entry: str
    first_take_ms: int


@dataclass(slots=True)
class Watched:
    """A batch under watch: what is collected of it, and how to learn what else is known of a group."""

    collection: BatchCollection
    outline: Callable[[int], OutgoingGroup]
    entries: Mapping[int, str]
    # Whether the broker that answers now has been told of this batch: not before it is opened, nor while a restarted
    # one may have lost it.
    is_there: Callable[[], bool] = lambda: True
    ended_since: dict[int, float] = field(default_factory=dict[int, float])
    # Shard → how often in a row it was found without a live instance.
    looks_without: dict[str, int] = field(default_factory=dict[str, int])
    warned: float = 0.0


def outline(batch: str, group: int, shard: str, route: str, rows: int, first_row: int) -> OutgoingGroup:
    """A group without its payload, to speak of it."""
    return OutgoingGroup(batch, group, shard, route, rows, first_row, Payload((), 0))


def parse_state(group: int, raw: bytes) -> GroupState:
    """The group's record; raises `ForeignEntryError` for what is none."""
    record = parse_group_record(raw)
    if record is None:
        raise ForeignEntryError(
            f"the record of group {group} was changed by somebody ({raw[:60]!r}); cancel the batch and run it again"
        )
    return GroupState(group, record.status, record.attempt, record.instance, record.entry, record.first_take_ms)


class Sweeper:
    """Sweeps the batches of one client. `taken_in` tells up to when (monotonic seconds) a shard's results were read."""

    def __init__(
        self,
        settings: BrokerSettings,
        keys: Keys,
        link: Link,
        transitions: ClientTransitions,
        taken_in: Callable[[str], float],
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._link = link
        self._transitions = transitions
        self._taken_in = taken_in
        self._absent_since: dict[str, tuple[float, float]] = {}

    async def sweep(self, watched: Watched) -> None:
        """Look once at every group that is still out, and end those that nobody will bring."""
        batch = watched.collection.batch
        out = watched.collection.unfinished()
        if not out:
            return
        shards = list(dict.fromkeys(watched.collection.shards[group] for group in out))
        results = [self._keys.results(self._transitions.client, shard) for shard in shards]
        replies = await ask(
            self._link,
            [
                ("TIME",),
                ("HMGET", self._keys.batch(batch), "state", "reason", "unread_bytes", *(f"g:{group}" for group in out)),
                ("HGETALL", self._keys.shards),
                ("EXISTS", *results),
            ],
        )
        now_ms = int(replies[0][0]) * 1000 + int(replies[0][1]) // 1000
        if not watched.is_there():
            return
        state, reason, unread, *raw_records = replies[1]
        if state is None:
            watched.collection.error(
                UnknownBatchError(f"batch {batch} is gone from the broker; somebody deleted or closed it")
            )
            return
        if state == b"closed":
            # The results stream that should have told it was deleted.
            watched.collection.cancelled(reason or b"")
            return
        if replies[3] < len(results):
            await self._make_results(batch, shards)
        if unread not in (None, b"0"):
            await self._transitions.forget_unread(batch, list(dict.fromkeys(watched.collection.shards)))
        states = [parse_state(group, raw) for group, raw in zip(out, raw_records, strict=True) if raw]
        self._end_abandoned(watched, out, states, is_sealed=state == b"sealed")
        states = [state for state in states if state.status != "abandoned"]
        records = _records(replies[2])
        alive = await self._alive(records)
        await self._expire_late(watched, states, records, now_ms)
        await self._expire_unhosted(watched, states, records, alive)
        await self._expire_vanished(watched, states, alive)
        self._warn_of_stall(watched, states, alive)

    async def _make_results(self, batch: str, shards: Sequence[str]) -> None:
        for shard in await self._transitions.make_results(shards):
            log.error(
                "batch %s: somebody deleted the stream of shard %s's results; it is there again. Groups whose rows "
                "went with it fail, what was running runs again", batch, shard,
            )  # fmt: skip

    def _end_abandoned(
        self, watched: Watched, out: Sequence[int], states: Sequence[GroupState], *, is_sealed: bool
    ) -> None:
        """End what was dropped while this client was away. All groups of a sealed batch were published, so one without
        a record is over too.
        """
        dropped = {state.group for state in states if state.status == "abandoned"}
        unknown = set(out).difference(state.group for state in states) if is_sealed else set[int]()
        for group in sorted(dropped | unknown):
            watched.collection.fail(group, ABANDONED)

    async def _alive(self, records: Mapping[str, ShardRecord]) -> dict[str, list[str]]:
        """Shard → labels of its instances that show signs of life."""
        labels = [(shard, label) for shard, record in records.items() for label in record.instances(shard)]
        if not labels:
            return {}
        found = await ask(self._link, [("EXISTS", self._keys.instance(label)) for _, label in labels])
        alive: dict[str, list[str]] = {shard: [] for shard in records}
        for (shard, label), exists in zip(labels, found, strict=True):
            if exists:
                alive[shard].append(label)
        return alive

    async def _expire_late(
        self, watched: Watched, states: Iterable[GroupState], records: Mapping[str, ShardRecord], now_ms: int
    ) -> None:
        if not self._link.watched_for(self._settings.lease_s):
            return
        for state in states:
            record = records.get(watched.collection.shards[state.group])
            # The worker ends its own group on time; one lease later nobody else will.
            limit = (record.group_timeout_s if record else 3600.0) + self._settings.lease_s
            if state.status not in ENDED and state.first_take_ms and now_ms - state.first_take_ms > limit * 1000:
                failure = Failure(
                    "infra", "DeadlineExceededError", f"not finished within {limit:g} s, last held by {state.instance}"
                )
                await self._expire(watched, state, "deadline", limit, failure)

    async def _expire_unhosted(
        self,
        watched: Watched,
        states: Iterable[GroupState],
        records: Mapping[str, ShardRecord],
        alive: Mapping[str, Sequence[str]],
    ) -> None:
        for shard in {watched.collection.shards[state.group] for state in states}:
            if alive.get(shard):
                self._absent_since.pop(shard, None)
                watched.looks_without.pop(shard, None)
                continue
            self._tell_of_absence(watched, shard)
            record = records.get(shard)
            if record and record.lost:
                watched.collection.error(
                    NoInstanceError(f"shard {shard} has no instance left and gets none: {record.lost}")
                )
                continue
            if not self._link.watched_for(self._settings.lease_s):
                self._absent_since.pop(shard, None)
                continue
            absent = self._absent_for(shard)
            if absent < self._settings.no_instance_timeout_s:
                continue
            failure = Failure(
                "infra", "NoInstanceError", f"no live instance of shard {shard} for {absent:.0f} s; is its fleet up?"
            )
            for state in states:
                if watched.collection.shards[state.group] == shard and state.status not in ENDED:
                    await self._expire(watched, state, "no_instance", self._settings.lease_s, failure)

    def _tell_of_absence(self, watched: Watched, shard: str) -> None:
        """Once, at the second look: after a broker's restart instances need a moment to come back."""
        looks = watched.looks_without[shard] = watched.looks_without.get(shard, 0) + 1
        if looks == 2:
            log.warning(
                "batch %s: no instance of shard %s shows signs of life; its groups wait %g s for one. Is a fleet "
                "running? `rolloutbus status` shows it, `rolloutbus up` starts one",
                watched.collection.batch, shard, self._settings.no_instance_timeout_s,
            )  # fmt: skip

    def _absent_for(self, shard: str) -> float:
        """Seconds since this shard was first found without an instance, looked at again and again since."""
        now = time.monotonic()
        since, looked = self._absent_since.get(shard, (now, now))
        if now - looked > _LOOKS_MISSED * self._settings.sweep_every_s:
            since = now
        self._absent_since[shard] = (since, now)
        return now - since

    async def _expire_vanished(
        self, watched: Watched, states: Sequence[GroupState], alive: Mapping[str, Sequence[str]]
    ) -> None:
        """A group whose entry was deleted by hand is met by nobody any more, unless somebody still runs it; a done one
        without results neither.
        """
        quiet = time.monotonic() - watched.collection.last_progress
        if quiet < self._settings.sweep_every_s:
            return
        for shard in dict.fromkeys(watched.collection.shards[state.group] for state in states):
            mine = [state for state in states if watched.collection.shards[state.group] == shard]
            held = alive.get(shard, ())
            out = [s for s in mine if s.status not in ENDED and not (s.status == "running" and s.instance in held)]
            stream = self._keys.groups(shard)
            # Looking for an entry costs the broker its payload, so only where there is a reason to doubt.
            doubtful = quiet > self._settings.stall_warning_s
            if out and (doubtful or (await ask(self._link, [("XLEN", stream)]))[0] < len(out)):
                await self._expire_deleted(watched, out[:_DOUBTED_AT_ONCE], stream)
        if quiet > self._settings.lease_s and self._link.watched_for(self._settings.lease_s):
            self._fail_without_results(watched, states)

    def _fail_without_results(self, watched: Watched, states: Sequence[GroupState]) -> None:
        """What ended on the broker is read within moments, unless its results are gone; but at this moment it may just
        have ended.
        """
        ended = [state for state in states if state.status in ENDED]
        for group in watched.ended_since.keys() - {state.group for state in ended}:
            del watched.ended_since[group]
        for state in ended:
            since = watched.ended_since.setdefault(state.group, time.monotonic())
            # Over a slow network, or while the reading connection cannot come back, they may still lie there unread.
            read = self._taken_in(watched.collection.shards[state.group]) > since
            if read and time.monotonic() - since > self._settings.lease_s:
                self._results_lost(watched, state)

    async def _expire_deleted(self, watched: Watched, states: Sequence[GroupState], stream: str) -> None:
        for state in states:
            entry = state.entry if state.entry != "-" else watched.entries.get(state.group, "")
            its_entry = f"its entry {entry}".rstrip()
            # The broker looks for itself, and does nothing where it finds the entry.
            failure = Failure("infra", "EntryDeletedError", f"{its_entry} was deleted from {stream} by somebody else")
            await self._expire(watched, state, "vanished", 0, failure)

    def _results_lost(self, watched: Watched, state: GroupState) -> None:
        message = "the broker says it ended, but its results are not on the stream; somebody deleted them"
        watched.collection.fail(
            state.group, Failure("infra", "ResultsLostError", message, "", state.instance, state.attempt)
        )

    async def _expire(
        self, watched: Watched, state: GroupState, reason: str, timeout_s: float, failure: Failure
    ) -> None:
        group = watched.outline(state.group)
        entry = watched.entries.get(state.group, "")
        answer = await self._transitions.expire(group.shard, group, entry, reason, timeout_s, failure)
        if answer == "dead":
            log.error("batch %s group %s: %s", group.batch, group.group, failure.message)
        elif answer == "again":
            log.warning(
                "batch %s group %s: the broker had forgotten who has it; it runs again", group.batch, group.group
            )

    def _warn_of_stall(
        self, watched: Watched, states: Sequence[GroupState], alive: Mapping[str, Sequence[str]]
    ) -> None:
        collection = watched.collection
        quiet = time.monotonic() - max(collection.last_progress, watched.warned)
        if quiet < self._settings.stall_warning_s:
            return
        watched.warned = time.monotonic()
        log.warning("batch %s: %s", collection.batch, describe_wait(watched, states, alive))


def describe_wait(watched: Watched, states: Sequence[GroupState], alive: Mapping[str, Sequence[str]]) -> str:
    """What a batch waits for: shard, groups, holders, since when."""
    quiet = time.monotonic() - watched.collection.last_progress
    parts: list[str] = []
    for shard in dict.fromkeys(watched.collection.shards[state.group] for state in states):
        mine = [state for state in states if watched.collection.shards[state.group] == shard]
        running = [f"group {s.group} on {s.instance} (attempt {s.attempt})" for s in mine if s.status == "running"]
        here = ", ".join(alive.get(shard, ())) or "none"
        words = [f"shard {shard} (instances alive: {here})"]
        if running:
            words.append(f"running: {_first_few(running)}")
        for status, how in {**WAITING, **dict.fromkeys(sorted(ENDED), "ended, and not read yet")}.items():
            if some := [str(state.group) for state in mine if state.status == status]:
                words.append(f"{how}: {counted(len(some), 'group')} ({_first_few(some)})")
        parts.append("; ".join(words))
    return f"nothing came for {quiet:.0f} s, waiting for " + " | ".join(parts)


def _first_few(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (" …" if len(words) > _SHOWN else "")


def _records(flat: Sequence[Any]) -> dict[str, ShardRecord]:
    pairs = iter(flat)
    return {
        name.decode(): record
        for name, raw in zip(pairs, pairs, strict=True)
        if (record := parse_record(raw)) is not None
    }

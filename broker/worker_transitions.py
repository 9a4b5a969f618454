"""The worker's atomic steps, each the typed face of one Lua script of the same name.

All of them may be repeated after a lost reply: the attempt's token tells a repetition from somebody else's write.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .channel import Arg, Command, Payload, raise_first_error
from .errors import BrokerFullError, RolloutBusError
from .keys import GROUP_NAME, Keys
from .messages import Failure, GroupEntry, row_fields
from .scripts import SCRIPTS
from .settings import BrokerSettings
from .shard_records import parse_record
from .steps import Runner, Step, run_step, run_steps
from .wording import excerpt


@dataclass(frozen=True, slots=True)
class Identity:
    """Who works: `label` never changes in an instance's life, `consumer` is new with each process."""

    shard: str
    label: str
    incarnation: str
    host: str = ""
    pid: int = 0

    @property
    def consumer(self) -> str:
        return f"{self.label}:{self.incarnation}"


class Taken(NamedTuple):
    """What `take` said. `status` is ok, stale, gone, parked, dead, suspect or unknown; `age_ms` counts from the group's
    first take, `queued_ms` from its publication, both on the broker's clock. `waiting`: about how many groups of its
    batch wait on this shard for their first take; 0 where that is not known.
    """

    status: str
    attempt: int = 0
    infra_failures: int = 0
    data_failures: int = 0
    age_ms: int = 0
    accepted: frozenset[int] = frozenset()
    queued_ms: int = 0
    waiting: int = 0


class Claimed(NamedTuple):
    """What `claim` found: entries to read and take, ms until the next retry is due (None: none), groups parked."""

    entries: list[str]
    next_due_ms: int | None
    parked: int


class Attempt(NamedTuple):
    """One delivery of a group to this instance, and the token that proves it."""

    group: GroupEntry
    token: str
    number: int


class Rows(NamedTuple):
    """Finished rows that share an entry: their positions in the group and one framed payload."""

    positions: tuple[int, ...]
    payload: Payload
    timing: str = ""


class Acceptance(NamedTuple):
    """Rows of one attempt that go to the broker in one step; `finish` ends the group with it."""

    attempt: Attempt
    rows: Sequence[Rows]
    finish: bool

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(at for rows in self.rows for at in rows.positions)


class Accepted(NamedTuple):
    """ok, repeated (both: it is in the broker), stale, gone, incomplete, or duplicate with the positions accepted
    before.
    """

    status: str
    unread_bytes: int = 0
    detail: str = ""

    @property
    def seen(self) -> frozenset[int]:
        return frozenset(int(at) for at in self.detail.split(",") if at) if self.status == "duplicate" else frozenset()


class Peers(NamedTuple):
    """The labels of the other instances of a shard: those that show signs of life, and all that the fleet has
    planned, None where it says nothing."""

    living: list[str]
    planned: list[str] | None


class HeldGroup(NamedTuple):
    """What a renewal must say of each group."""

    batch: str
    entry: str
    group: int
    token: str


def _positions(raw: bytes) -> frozenset[int]:
    return frozenset(int(at) for at in raw.split(b",") if at)


def _spelled(positions: tuple[int, ...], rows: int) -> str:
    whole = len(positions) == rows and len(set(positions)) == rows == max(positions) + 1
    return "all" if whole else ",".join(map(str, positions))


@functools.cache
def _crash(limit: int) -> bytes:
    """The failure of a group whose last attempt of `limit` lost its instance; the same for each, so packed once."""
    return Failure(
        "infra",
        "InstanceDied",
        f"its instance died or lost its lease while it ran this group; of {limit} infra attempts this was the last",
    ).packed()


def _accepted(answer: list[Any] | Exception) -> Accepted | RolloutBusError:
    if isinstance(answer, RolloutBusError):
        return answer
    if isinstance(answer, Exception):
        raise answer
    status, unread, detail = answer[-1]
    return Accepted(status.decode(), unread, detail.decode())


class WorkerTransitions:
    """One instance's steps over `runner`; safe to use from several tasks."""

    def __init__(self, runner: Runner, keys: Keys, settings: BrokerSettings, identity: Identity) -> None:
        self._runner = runner
        self._keys = keys
        self.settings = settings
        self._identity = identity
        self._groups = keys.groups(identity.shard)
        self._delayed = keys.delayed(identity.shard)
        self._parked = keys.parked(identity.shard)

    async def prepare(self) -> None:
        """Make sure that the shard's stream and consumer group exist; entries from before count too."""
        await run_step(self._runner, SCRIPTS["prepare"].call([self._groups], self.settings.key_ttl_ms))

    def read_command(self, count: int, block_ms: int | None) -> Command:
        """A read of new entries; one that waits for some, `block_ms` at most, needs a channel of its own."""
        wait = () if block_ms is None else ("BLOCK", block_ms)
        return (
            "XREADGROUP", "GROUP", GROUP_NAME, self._identity.consumer, "COUNT", count, *wait,
            "STREAMS", self._groups, ">",
        )  # fmt: skip

    async def unseen(self) -> list[Any]:
        """Entries that were delivered to this consumer; after a reconnect some may never have been seen.

        Those that somebody deleted meanwhile come without fields: they are nobody's work any more, and are
        acknowledged.
        """
        reply = (
            await self._runner.run(
                [("XREADGROUP", "GROUP", GROUP_NAME, self._identity.consumer, "STREAMS", self._groups, "0")]
            )
        )[0]
        raise_first_error([reply])
        entries: list[Any] = reply[0][1] if reply else []
        deleted = [entry for entry, fields in entries if fields is None]
        if deleted:
            await self._runner.run([("XACK", self._groups, GROUP_NAME, *deleted)])
        return [raw for raw in entries if raw[1] is not None]

    async def fetch(self, entries: Sequence[str]) -> list[Any]:
        """Raw entries by id, those that are gone left out."""
        replies = await self._runner.run([("XRANGE", self._groups, entry, entry) for entry in entries])
        return [reply[0] for reply in replies if isinstance(reply, list) and reply]

    async def take(self, group: GroupEntry, token: str, *, observing: bool, crash_limit: int) -> Taken:
        """Turn a delivered entry into an attempt under `token`, or learn why not."""
        keys, at = self._keys, self.settings
        command = SCRIPTS["take"].call(
            [keys.batch(group.batch), self._groups, keys.owner(group.client), keys.accepted(group.batch), self._parked,
             keys.results(group.client, self._identity.shard), keys.dead, keys.events, self._delayed,
             keys.instance(self._identity.label)],
            group.batch, group.group, group.route, group.entry, group.first_row, group.rows, token,
            self._identity.consumer, self._identity.label, int(observing), at.lease_ms, at.abandon_ms,
            crash_limit, _crash(crash_limit), at.max_dead_bytes,
        )  # fmt: skip
        reply = (await run_step(self._runner, command))[0]
        if reply[0] != b"ok":
            return Taken(reply[0].decode())
        return Taken("ok", reply[1], reply[2], reply[3], reply[4], _positions(reply[5]), reply[6], reply[7])

    async def claim(self, limit: int, *, observing: bool, peers: Sequence[str], patience_s: float = 3600.0) -> Claimed:
        """Take over what may run again: due retries, parked groups with room, expired leases (if `observing`).

        A retry is left to those of `peers`, the living ones, that have not failed its group, if this instance has; but
        not for longer than `patience_s`.
        """
        command = SCRIPTS["claim"].call(
            [self._groups, self._delayed, self._parked],
            self._identity.consumer, self._identity.label, self.settings.lease_ms, limit, int(observing),
            self._keys.prefix, self.settings.abandon_ms, int(patience_s * 1000), *peers,
        )  # fmt: skip
        entries, due, parked = (await run_step(self._runner, command))[0]
        return Claimed([entry.decode() for entry in entries], None if due < 0 else due, parked)

    async def renew(self, held: Sequence[HeldGroup], slots: int, *, observing: bool) -> list[str] | None:
        """Sign of life and renewal of all `held`; per group ok, lost or gone. None: the label belongs to another
        process now.
        """
        reply = (await run_step(self._runner, self._renew_command(held, slots, observing=observing)))[0]
        return None if reply[0] != b"ok" else [word.decode() for word in reply[1:]]

    def _renew_command(
        self, held: Sequence[HeldGroup], slots: int, *, observing: bool, replacing: bool = False
    ) -> Command:
        batches = list(dict.fromkeys(group.batch for group in held))
        places = {batch: at + 6 for at, batch in enumerate(batches)}
        me, at = self._identity, self.settings
        words: list[Arg] = []
        for group in held:
            words += [places[group.batch], group.entry, group.group, group.token]
        return SCRIPTS["renew"].call(
            [self._groups, self._keys.instance(me.label), self._delayed, self._parked, self._keys.events,
             *map(self._keys.batch, batches)],
            me.consumer, me.incarnation, at.instance_ttl_ms, at.key_ttl_ms, at.lease_ms, at.abandon_ms, int(observing),
            self._keys.prefix, me.host, me.pid, len(held), slots, me.shard, int(replacing), *words,
        )  # fmt: skip

    async def register(self) -> None:
        """Take the label over: an older process under it will see that and stop."""
        await run_step(self._runner, self._renew_command([], 0, observing=False, replacing=True))

    async def accept(self, acceptances: Sequence[Acceptance]) -> list[Accepted | RolloutBusError]:
        """Put finished rows into the broker, each acceptance all or nothing; at `maxmemory` the slower way that always
        finishes.

        What the broker refuses of one acceptance stands in its place as an error, and harms no other.
        """
        answers = await run_steps(self._runner, [self._accept_step(acceptance) for acceptance in acceptances])
        accepted: list[Accepted | RolloutBusError] = []
        begun: set[str] = set()
        for acceptance, answer in zip(acceptances, answers, strict=True):
            token = acceptance.attempt.token
            # A finish that ran before what it covers, because that was refused and sent again, left nothing behind.
            too_early = token in begun and isinstance(answer, list) and answer[-1][0] == b"incomplete"
            if too_early or isinstance(answer, BrokerFullError):
                answer = (await run_steps(self._runner, [[self._accept_command(acceptance, inline=True)]]))[0]
            begun.add(token)
            accepted.append(_accepted(answer))
        return accepted

    def _accept_step(self, acceptance: Acceptance) -> Step:
        results = self._keys.results(acceptance.attempt.group.client, self._identity.shard)
        adds = [
            ("XADD", results, "NOMKSTREAM", "*", *self._fields(acceptance.attempt, rows)) for rows in acceptance.rows
        ]
        return [*adds, self._accept_command(acceptance, inline=False)]

    def _fields(self, attempt: Attempt, rows: Rows) -> tuple[Arg, ...]:
        return row_fields(
            attempt.group, rows.positions, attempt.number, self._identity.label, rows.timing, rows.payload
        )

    def _accept_command(self, acceptance: Acceptance, *, inline: bool) -> Command:
        attempt, keys = acceptance.attempt, self._keys
        group = attempt.group
        words: list[Arg] = []
        for rows in acceptance.rows if inline else ():
            fields = self._fields(attempt, rows)
            words += [len(fields), *fields[:-1], rows.payload.joined()]
        return SCRIPTS["accept"].call(
            [keys.batch(group.batch), keys.accepted(group.batch), keys.results(group.client, self._identity.shard),
             self._groups, keys.events],
            group.batch, group.group, attempt.token, group.entry, 0 if inline else len(acceptance.rows),
            sum(rows.payload.size for rows in acceptance.rows), int(acceptance.finish), group.rows, group.first_row,
            _spelled(acceptance.positions, group.rows), self._identity.label, *words,
        )  # fmt: skip

    async def fail(self, attempt: Attempt, failure: Failure, *, limit: int, delay_s: float) -> str:
        """Report a failed attempt: retry, dead (its class has used `limit` attempts up), stale or gone."""
        group, keys = attempt.group, self._keys
        failure = dataclasses.replace(failure, instance=self._identity.label, attempt=attempt.number)
        command = SCRIPTS["fail"].call(
            [keys.batch(group.batch), self._groups, self._delayed, keys.results(group.client, self._identity.shard),
             keys.dead, keys.events],
            group.batch, group.group, group.route, group.first_row, group.rows, attempt.token,
            self._identity.label, failure.failure_class, limit, int(delay_s * 1000), failure.packed(),
            excerpt(f"{failure.type}: {failure.message}", 300), self.settings.max_dead_bytes,
        )  # fmt: skip
        return (await run_step(self._runner, command))[0][0].decode()

    async def release(self, attempt: Attempt) -> str:
        """Hand a group back in good order; it counts as no failure."""
        group, keys = attempt.group, self._keys
        command = SCRIPTS["release"].call(
            [keys.batch(group.batch), self._groups, self._delayed, keys.events],
            group.batch, group.group, attempt.token, self._identity.label,
        )  # fmt: skip
        return (await run_step(self._runner, command))[0][0].decode()

    async def set_aside(self, entry: str, reason: str) -> None:
        """Move a stranger's entry to the dead letters."""
        await run_step(
            self._runner,
            SCRIPTS["set_aside"].call(
                [self._groups, self._keys.dead, self._keys.events], entry, reason, self.settings.max_dead_bytes
            ),
        )

    async def peers(self) -> Peers:
        """Who else there is for this shard, by the fleet's record."""
        record = (await self._runner.run([("HGET", self._keys.shards, self._identity.shard)]))[0]
        known = parse_record(record if isinstance(record, bytes) else None)
        if known is None:
            return Peers([], None)
        others = [label for label in known.instances(self._identity.shard) if label != self._identity.label]
        alive = await self._runner.run([("EXISTS", self._keys.instance(label)) for label in others]) if others else []
        return Peers([label for label, is_alive in zip(others, alive, strict=True) if is_alive == 1], others)

    async def leave(self) -> None:
        """Take this instance off the books; called when it stops for good."""
        me = self._identity
        await run_step(
            self._runner,
            SCRIPTS["leave"].call([self._groups, self._keys.instance(me.label)], me.consumer, me.incarnation),
        )

"""Reading what a run's state on the broker is: shards, instances, batches, dead letters. It writes nothing and needs no
fleet.

What is not ours, or broken, is named in `RunState.unreadable` and stands as empty: the rest of the run is told. The
results are plain values without secrets: no payloads, no attempt tokens, no incarnations. Times are the broker's.
Payloads never leave the broker for it: what would return them runs as a read-only script there.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .channel import Command, ReplyError
from .dead_letters import DeadLetter, read_dead_letters
from .group_record import MOST, plain_number
from .handshake import translate
from .keys import ANY_ROUTE, GROUP_NAME, NAME_PATTERN, Keys
from .running_groups import Hosting, RunningGroup, longest_running
from .shard_records import ShardRecord, parse_record, shard_of_label
from .steps import Runner, ask

_RUN_OF_KEY = re.compile(r"rolloutbus:\{([^{}]+)\}:")
_SCAN_COUNT = 1000
_VERSION_FIELD = ":version"
# One snapshot per shard, so that its counts belong together; XRANGE alone would send the oldest group's payload along.
_GLANCE = f"""
local held = redis.pcall('XPENDING', KEYS[1], '{GROUP_NAME}')
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)
return {{ redis.call('XLEN', KEYS[1]), held.err and 0 or held[1],
  redis.call('ZCARD', KEYS[2]), redis.call('ZCARD', KEYS[3]), first[1] and first[1][1] or '' }}
"""


_NOTHING = (0, 0, 0, 0, b"")


@dataclass(frozen=True, slots=True)
class InstanceState:
    """One instance that shows signs of life."""

    label: str
    shard: str
    host: str
    pid: int
    running: int
    slots: int


@dataclass(frozen=True, slots=True)
class ShardState:
    """Groups of one shard by what they wait for; `unfinished` is their sum, the length of its stream.

    `running` were delivered to an instance, `delayed` wait for a retry, `parked` for their batch to have room.
    `oldest_age_s` is how long ago the oldest of them was published, `longest` which one has run for longest.
    `dead_letters` are those still in the capped stream. `commit` and `group_timeout_s` are None without a record.
    """

    shard: str
    replicas: int
    slots: int
    unfinished: int
    queued: int
    running: int
    delayed: int
    parked: int
    oldest_age_s: float | None
    instances: tuple[InstanceState, ...]
    dead_letters: int
    routes: tuple[str, ...]
    lost: str = ""
    commit: str | None = None
    group_timeout_s: float | None = None
    longest: RunningGroup | None = None


@dataclass(frozen=True, slots=True)
class BatchState:
    """One batch that is on the broker. `statuses` counts its groups by record, which a cancelled batch keeps as they
    were; `client_seen_s` is how long ago its client renewed its lease, None if never.
    """

    batch: str
    client: str
    state: str
    reason: str
    groups: int
    rows: int
    published: int
    completed: int
    failed: int
    cancelled: int
    statuses: Mapping[str, int]
    unread_bytes: int
    age_s: float
    client_seen_s: float | None

    @property
    def is_closed(self) -> bool:
        """An operator cancelled it, and its client has not put it away yet."""
        return self.state == "closed"


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a glance at a run tells. `unreadable`: what of it nobody of ours can have written, by name."""

    run: str
    fleet: bool
    shards: tuple[ShardState, ...]
    batches: tuple[BatchState, ...]
    dead_letters: int
    events: int
    unreadable: tuple[str, ...] = ()

    @property
    def open_batches(self) -> list[BatchState]:
        """Those that go on: open, or sealed."""
        return [batch for batch in self.batches if not batch.is_closed]

    @property
    def closed_batches(self) -> list[BatchState]:
        return [batch for batch in self.batches if batch.is_closed]

    def batch(self, batch: str) -> BatchState | None:
        return next((state for state in self.batches if state.batch == batch), None)


async def scan(runner: Runner, pattern: str) -> list[str]:
    """All keys that match, sorted."""
    cursor, found = b"0", set[str]()
    while True:
        cursor, keys = (await ask(runner, [("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)]))[0]
        found.update(key.decode(errors="replace") for key in keys)
        if cursor == b"0":
            return sorted(found)


async def find_runs(runner: Runner) -> list[str]:
    """Names of all runs that have more on the broker than a client's lease, sorted. A key that no run can have is a
    stranger's.
    """
    found = [(match, key) for key in await scan(runner, "rolloutbus:{*}:*") if (match := _RUN_OF_KEY.match(key))]
    # A client that waited for a fleet of a mistyped name leaves that, until it expires.
    named = {match[1] for match, key in found if not key.startswith("owner:", match.end())}
    return sorted(run for run in named if NAME_PATTERN.fullmatch(run))


async def inspect_run(runner: Runner, run: str) -> RunState:
    """Look at one run; a run without keys gives an empty state."""
    keys = Keys(run)
    names = [name.removeprefix(keys.prefix) for name in await scan(runner, keys.prefix + "*")]
    look = _Look(runner, keys)
    now_s = await look.now_s()
    routes, records = await look.hashes([keys.routes, keys.shards])
    fleet = (await ask(runner, [("EXISTS", keys.fleet)]))[0]
    dead, events = (reply or 0 for reply in await look.ask([("XLEN", keys.dead), ("XLEN", keys.events)]))
    instances = await _instances(look, _named(names, "instance"))
    letters = await read_dead_letters(runner, keys) if dead else []
    shards = await _shards(look, names, routes, records, instances, letters, now_s)
    found = await _batch_hashes(look, _named(names, "batch"))
    batches = await _batches(look, found, now_s)
    return RunState(
        run, bool(fleet), _with_longest(shards, found, now_s), batches, dead, events, tuple(look.unreadable)
    )


class _Look:
    """Asks about one run, and notes in `unreadable` what it cannot make sense of."""

    def __init__(self, runner: Runner, keys: Keys) -> None:
        self.keys = keys
        self.unreadable: list[str] = []
        self._runner = runner

    async def ask(self, commands: Sequence[Command], *, named: bool = True) -> list[Any]:
        """The replies; None for a key of another type, noted where `named`: as what comes second in the command."""
        replies = await self._runner.run(commands) if commands else []
        for at, (command, reply) in enumerate(zip(commands, replies, strict=True)):
            if isinstance(reply, ReplyError):
                if not str(reply).startswith("WRONGTYPE"):
                    raise translate(reply, "the broker")
                if named:
                    self.note(str(command[1]), "it is of another type")
                replies[at] = None
        return replies

    async def now_s(self) -> float:
        now = (await ask(self._runner, [("TIME",)]))[0]
        return int(now[0]) + int(now[1]) / 1e6

    async def hashes(self, names: Sequence[str]) -> list[dict[str, str]]:
        return [decoded(flat or ()) for flat in await self.ask([("HGETALL", name) for name in names])]

    def number(self, key: str, fields: Mapping[str, str], name: str) -> int:
        """The field as a number; 0 where it is missing."""
        with contextlib.suppress(ValueError):
            return plain_number(fields.get(name, "0"), -MOST)
        self.note(key, f"{name} {fields[name]!r}")
        return 0

    def record(self, shard: str, raw: str) -> ShardRecord:
        record = parse_record(raw.encode())
        if record is None:
            self.note(self.keys.shards, f"the record of {shard!r}")
        return record or ShardRecord()

    def note(self, key: str, what: str) -> None:
        """`what` of the run's key is not ours."""
        self.unreadable.append(f"{key.removeprefix(self.keys.prefix)}: {what}")


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """A hash as the server sends it, as a mapping."""
    words = iter(flat)
    return dict(zip(words, words, strict=True))


def decoded(flat: Sequence[bytes]) -> dict[str, str]:
    """A hash of text as the server sends it, as a mapping."""
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in pairs(flat).items()}


def _named(names: Iterable[str], kind: str) -> list[str]:
    return [name.removeprefix(f"{kind}:") for name in names if name.startswith(f"{kind}:")]


async def _instances(look: _Look, labels: Sequence[str]) -> list[InstanceState]:
    keys = [look.keys.instance(label) for label in labels]
    states: list[InstanceState] = []
    for label, key, fields in zip(labels, keys, await look.hashes(keys), strict=True):
        # It may have signed off since the scan.
        if fields:
            shard = fields.get("shard") or shard_of_label(label)
            numbers = (look.number(key, fields, name) for name in ("pid", "running", "slots"))
            states.append(InstanceState(label, shard, fields.get("host", ""), *numbers))
    return states


async def _shards(
    look: _Look,
    names: Sequence[str],
    routes: Mapping[str, str],
    records: Mapping[str, str],
    instances: Sequence[InstanceState],
    letters: Sequence[DeadLetter],
    now_s: float,
) -> tuple[ShardState, ...]:
    known = {name: look.record(name, raw) for name, raw in records.items()}
    shards = list(
        dict.fromkeys([*known, *_named(names, "groups"), *_named(names, "delayed"), *_named(names, "parked")])
    )
    keys = look.keys
    names_of = [(keys.groups(shard), keys.delayed(shard), keys.parked(shard)) for shard in shards]
    glances = await look.ask([("EVAL_RO", _GLANCE, 3, *of_one) for of_one in names_of], named=False)
    for (groups, delayed, parked), glance in zip(names_of, glances, strict=True):
        # The glance failed at one of three keys; this names it, or them.
        if glance is None:
            await look.ask([("XLEN", groups), ("ZCARD", delayed), ("ZCARD", parked)])
    routes = {route: shard for route, shard in routes.items() if route != _VERSION_FIELD}
    dead = Counter(routes.get(letter.route) or routes.get(ANY_ROUTE, "") for letter in letters)
    return tuple(
        _shard(shard, known.get(shard), glance or _NOTHING, routes, instances, dead[shard], now_s)
        for shard, glance in zip(shards, glances, strict=True)
    )


def _shard(
    shard: str,
    record: ShardRecord | None,
    glance: Sequence[Any],
    routes: Mapping[str, str],
    instances: Sequence[InstanceState],
    dead: int,
    now_s: float,
) -> ShardState:
    unfinished, running, delayed, parked, oldest = glance
    published_ms = int(oldest.partition(b"-")[0]) if oldest else None
    return ShardState(
        shard=shard,
        replicas=record.replicas if record else 0,
        slots=record.slots if record else 0,
        unfinished=unfinished,
        queued=max(0, unfinished - running - delayed - parked),
        running=running,
        delayed=delayed,
        parked=parked,
        oldest_age_s=None if published_ms is None else max(0.0, now_s - published_ms / 1000),
        instances=tuple(instance for instance in instances if instance.shard == shard),
        dead_letters=dead,
        routes=tuple(sorted(route for route, host in routes.items() if host == shard)),
        lost=record.lost if record else "",
        commit=record.commit if record else None,
        group_timeout_s=record.group_timeout_s if record else None,
    )


def _with_longest(
    shards: Sequence[ShardState], batches: Mapping[str, Mapping[str, str]], now_s: float
) -> tuple[ShardState, ...]:
    hosting = Hosting(
        {instance.label: shard.shard for shard in shards for instance in shard.instances},
        {shard.shard: shard.group_timeout_s for shard in shards},
    )
    longest = longest_running(batches, hosting, now_s)
    return tuple(replace(shard, longest=longest.get(shard.shard)) for shard in shards)


async def _batch_hashes(look: _Look, batches: Sequence[str]) -> dict[str, dict[str, str]]:
    return dict(zip(batches, await look.hashes([look.keys.batch(batch) for batch in batches]), strict=True))


async def _batches(look: _Look, found: Mapping[str, Mapping[str, str]], now_s: float) -> tuple[BatchState, ...]:
    clients = sorted({fields["client"] for fields in found.values() if "client" in fields})
    replies = await look.ask([("GET", look.keys.owner(client)) for client in clients])
    leases = dict(zip(clients, replies, strict=True))
    states: list[BatchState] = []
    for batch, fields in found.items():
        if "client" in fields:
            states.append(_batch(look, batch, fields, _seen_s(leases[fields["client"]], fields, now_s), now_s))
        elif fields:
            look.note(look.keys.batch(batch), "it names no client")
    return tuple(sorted(states, key=lambda state: -state.age_s))


def _seen_s(lease: bytes | None, batch: Mapping[str, str], now_s: float) -> float | None:
    """A lease's value is `incarnation renewed_ms`. Of the process that owns the batch nobody was seen where it is
    something else, or another process's.
    """
    with contextlib.suppress(ValueError):
        holder, renewed_ms = (lease or b"").decode(errors="replace").split()
        if holder == batch.get("owner", holder):
            return max(0.0, now_s - plain_number(renewed_ms) / 1000)
    return None


def _batch(look: _Look, batch: str, fields: Mapping[str, str], seen_s: float | None, now_s: float) -> BatchState:
    key = look.keys.batch(batch)
    statuses = Counter(value.partition(" ")[0] for name, value in fields.items() if name.startswith("g:"))
    counts = ("groups", "rows", "published", "completed", "failed", "cancelled", "unread_bytes")
    return BatchState(
        batch=batch,
        client=fields["client"],
        state=fields.get("state", ""),
        reason=fields.get("reason", ""),
        statuses=dict(statuses),
        age_s=max(0.0, now_s - (look.number(key, fields, "opened") or now_s)),
        client_seen_s=seen_s,
        **{name: look.number(key, fields, name) for name in counts},
    )

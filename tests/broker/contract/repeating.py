"""A run with two shards, three workers and two clients in which every command is kept, and may be sent again at any
time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from rolloutbus.broker.channel import Command, Payload, ReplyError
from rolloutbus.broker.client_transitions import BatchSpec, Books, ClientTransitions, OutgoingGroup
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.keys import GROUP_NAME, Keys
from rolloutbus.broker.messages import GroupEntry, ResultEntry, parse_group, parse_result
from rolloutbus.broker.scripts import SCRIPTS
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.steps import Runner
from rolloutbus.broker.worker_transitions import Attempt, Identity, WorkerTransitions
from rolloutbus.collector import BatchCollection, Sink
from rolloutbus.collector.sweep import ABANDONED

from tests.broker.contract.stage import RECORD_WORDS

Value = TypeVar("Value")
SHARDS = ("math", "code")
CLIENTS = ("trainer", "judge")
ENDED = ("done", "handed", "failed", "abandoned")
# What a refused or repeated write may count, and when somebody was seen last.
STATISTICS = ("stale_writes", "duplicate_rows")
_NAMES = {script.sha: name for name, script in SCRIPTS.items()}
_CHANGING = ("DEL", "SET", "XADD", "XCLAIM", "XREADGROUP", "ZADD")
# Where the token stands among the arguments of a step that is an attempt's.
_TOKEN_AT = {"accept": 2, "fail": 5, "release": 2}
# Where the incarnation stands among those of a step that only the batch's owner may do.
_OWNER_AT = {"publish": 0, "seal": 0, "handed": 0, "expire": 6, "restore": 0, "close": 0}
_numbers = itertools.count()


def pairs(reply: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Names and values, which fakeredis gives as pairs and a server one after the other."""
    return (
        [(n, v) for n, v in reply]
        if reply and isinstance(reply[0], list)
        else list(zip(reply[::2], reply[1::2], strict=True))
    )


class Sent(NamedTuple):
    """One write as it went to the broker."""

    commands: Sequence[Command]

    @property
    def batches(self) -> set[str]:
        """The batches that its scripts name."""
        return {str(word).rsplit(":", 1)[1] for words in self.commands for word in words if ":batch:" in str(word)}

    @property
    def calls(self) -> list[tuple[str, list[str]]]:
        """Its scripts, each with its arguments."""
        scripts = [words for words in self.commands if words[0] == "EVALSHA"]
        return [(_NAMES[str(words[1])], [str(word) for word in words[3 + int(str(words[2])) :]]) for words in scripts]

    def __repr__(self) -> str:
        return "; ".join(f"{name} {' '.join(words[:7])}" for name, words in self.calls)


class Recorder:
    """Passes commands on and keeps each write that calls a script."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.sent: list[Sent] = []
        # What was sent last, as long as nothing else has happened since.
        self.last: Sent | None = None

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        if any(words[0] == "EVALSHA" for words in commands):
            self.last = Sent(tuple(map(tuple, commands)))
            self.sent.append(self.last)
        return await self._inner.run(commands)

    async def again(self, sent: Sent) -> list[Any]:
        """As a link does it: over a new connection, on which the scripts were loaded."""
        self.last = None
        await self._inner.run([("SCRIPT", "LOAD", script.source) for script in SCRIPTS.values()])
        replies = await self._inner.run(sent.commands)
        errors = [reply for reply in replies if isinstance(reply, ReplyError) and not str(reply).startswith("NOGROUP")]
        assert not errors, (sent, errors)
        return replies


@dataclass
class Process:
    """A client's process: an incarnation of its name."""

    transitions: ClientTransitions
    number: int


@dataclass
class Plan:
    """A batch as its client knows it, and all that was ever seen of its results, by entry."""

    id: str
    process: Process
    size: int
    groups: list[OutgoingGroup]
    collection: BatchCollection | None = None
    entries: dict[int, str] = field(default_factory=dict[int, str])
    outcomes: list[int] = field(default_factory=list[int])
    seen: dict[tuple[str, str], ResultEntry] = field(default_factory=dict[tuple[str, str], ResultEntry])
    sealed: bool = False
    over: bool = False
    cancelled: bool = False
    # What its client was told by somebody's damage, or by nobody, cannot be counted.
    damaged: bool = False

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.shard for group in self.groups)) or SHARDS[:1]

    @property
    def spec(self) -> BatchSpec:
        layout = json.dumps([[group.shard, group.route, 1] for group in self.groups])
        return BatchSpec(self.id, len(self.groups), len(self.groups) * self.size, self.size, self.shards, layout)

    def collect_anew(self) -> None:
        rows = [{"_rowidx": at} for at in range(len(self.groups) * self.size)]
        self.outcomes = []
        sink = Sink(lambda outcome: self.outcomes.append(outcome.group_index), lambda _: None)
        shards = [group.shard for group in self.groups]
        self.collection = BatchCollection(self.id, rows, self.size, shards, sink) if rows else None


@dataclass
class Hands:
    """A worker's process, and what it was given and has not taken yet."""

    shard: str
    transitions: WorkerTransitions
    consumer: str
    given: list[GroupEntry] = field(default_factory=list[GroupEntry])


class World:
    """Everybody who plays, and the broker behind them."""

    def __init__(self, inner: Runner, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._inner = inner
        self._loop = loop
        self.recorder = Recorder(inner)
        self.keys = Keys(f"repeats{next(_numbers)}")
        self.settings = BrokerSettings(max_unread_bytes=120)
        self.run(inner.run([("SCRIPT", "LOAD", script.source) for script in SCRIPTS.values()]))
        self.plans: list[Plan] = []
        self.attempts: list[tuple[Hands, Attempt]] = []
        self._tokens = map("t{}".format, itertools.count())
        self.processes = {name: self.process(name, 0) for name in CLIENTS}
        self.hands = [self.worker("math", "math/0"), self.worker("math", "math/1"), self.worker("code", "code/0")]
        # Shards of which somebody deleted the groups.
        self.damaged: set[str] = set()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """fakeredis answers at once; a real server has a loop."""
        if self._loop is not None:
            return self._loop.run_until_complete(work)
        try:
            work.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("a step waited")

    def raw(self, *words: Any) -> Any:
        if words[0] in _CHANGING:
            self.recorder.last = None
        reply = self.run(self._inner.run([words]))[0]
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def process(self, name: str, number: int) -> Process:
        return Process(ClientTransitions(self.recorder, self.keys, self.settings, name, f"i{number}"), number)

    def worker(self, shard: str, label: str) -> Hands:
        identity = Identity(shard, label, f"c{next(_numbers)}", "host", 1)
        hands = Hands(shard, WorkerTransitions(self.recorder, self.keys, self.settings, identity), identity.consumer)
        self.run(hands.transitions.prepare())
        self.run(hands.transitions.register())
        return hands

    # What there is on the broker.
    def fields(self, plan: Plan) -> dict[str, str]:
        found = pairs(self.raw("HGETALL", self.keys.batch(plan.id)))
        return {name.decode(): value.decode() for name, value in found}

    def records(self, plan: Plan) -> dict[int, dict[str, str]]:
        return {
            int(name[2:]): dict(zip(RECORD_WORDS, value.split(" "), strict=True))
            for name, value in self.fields(plan).items()
            if name.startswith("g:")
        }

    def stream(self, key: str) -> list[tuple[str, list[bytes]]]:
        return [(entry.decode(), words) for entry, words in self.raw("XRANGE", key, "-", "+")]

    def pending(self, shard: str) -> dict[str, str]:
        """Entry → consumer, of what is pending."""
        key = self.keys.groups(shard)
        if not self.raw("EXISTS", key):
            return {}
        return {found[0].decode(): found[1].decode() for found in self.raw("XPENDING", key, GROUP_NAME, "-", "+", 100)}

    def results(self, client: str) -> Iterable[tuple[str, ResultEntry]]:
        for shard in SHARDS:
            for entry, words in self.stream(self.keys.results(client, shard)):
                yield shard, parse_result(entry.encode(), words)

    def forget(self) -> None:
        """A server is another run's too."""
        for name in self.names():
            self.raw("DEL", self.keys.prefix + name)

    def names(self) -> list[str]:
        found = self.raw("KEYS", self.keys.prefix.replace("[", "\\[") + "*")
        return sorted(name.decode().removeprefix(self.keys.prefix) for name in found)

    def digest(self) -> dict[str, Any]:
        """All that counts: neither events nor ages, nor what refusals add to statistics."""
        out: dict[str, Any] = {}
        for name in self.names():
            key = self.keys.prefix + name
            kind = name.split(":")[0]
            if kind in ("batch", "instance"):
                found = pairs(self.raw("HGETALL", key))
                out[name] = {word: value for word, value in found if word.decode() not in STATISTICS}
            elif kind in ("delayed", "parked"):
                out[name] = self.raw("ZRANGE", key, 0, -1, "WITHSCORES")
            elif kind in ("groups", "results", "dead"):
                out[name] = [entry for entry, _ in self.stream(key)]
            elif kind == "accepted":
                out[name] = self.raw("GET", key).rstrip(b"\0")
            elif kind == "owner":
                out[name] = self.raw("GET", key).split()[0]
        for shard in SHARDS:
            out[f"pending:{shard}"] = self.pending(shard)
        return out

    # Time.
    def lease_expires(self, shard: str, entry: str) -> None:
        holder = self.pending(shard)[entry]
        idle = self.settings.lease_ms + 1
        self.raw("XCLAIM", self.keys.groups(shard), GROUP_NAME, holder, 0, entry, "IDLE", idle, "JUSTID")

    def all_leases_expire(self) -> None:
        for shard in SHARDS:
            for entry in self.pending(shard):
                self.lease_expires(shard, entry)

    def retries_are_due(self) -> None:
        for shard in SHARDS:
            for member in self.raw("ZRANGE", self.keys.delayed(shard), 0, -1):
                self.raw("ZADD", self.keys.delayed(shard), 0, member)

    def owner_absent(self, client: str, seconds: int) -> None:
        holder = self.raw("GET", self.keys.owner(client))
        if holder is not None:
            renewed = int(self.raw("TIME")[0]) * 1000 - seconds * 1000
            value = f"{holder.decode().split()[0]} {renewed}"
            self.raw("SET", self.keys.owner(client), value, "PX", self.settings.key_ttl_ms)

    # What clients do.
    def plan(self, client: str, size: int, shards: Sequence[str]) -> Plan:
        batch = f"b{len(self.plans)}"
        payload = Payload.of([b"ten bytes."])
        groups = [OutgoingGroup(batch, at, shard, "adds", size, at * size, payload) for at, shard in enumerate(shards)]
        plan = Plan(batch, self.processes[client], size, groups)
        plan.collect_anew()
        self.plans.append(plan)
        return plan

    def publish(self, plan: Plan, places: Sequence[int], *, heard: bool) -> None:
        groups = [plan.groups[at] for at in places]
        answers = self.run(plan.process.transitions.publish(groups))
        for group, answer in zip(groups, answers, strict=True):
            if heard and not isinstance(answer, RolloutBusError) and answer.entry:
                plan.entries[group.group] = answer.entry

    def hold(self, client: str) -> None:
        """Renew the name. A former process that renewed it again while this one was away has it for a lease."""
        if self.run(self.processes[client].transitions.own()):
            self.owner_absent(client, 31)
            assert self.run(self.processes[client].transitions.own()) == 0

    def come_back(self, client: str) -> None:
        """Another process takes the name and what was sealed under it."""
        self.owner_absent(client, 31)
        process = self.processes[client] = self.process(client, self.processes[client].number + 1)
        assert self.run(process.transitions.own()) == 0
        for plan in self.plans:
            if plan.process.transitions.client == client and not plan.over and not plan.cancelled and plan.sealed:
                self.run(process.transitions.adopt(plan.id))
                plan.process = process
                plan.collect_anew()
                self._tell(plan)

    def _tell(self, plan: Plan) -> None:
        for group, record in self.records(plan).items() if plan.collection else ():
            told = record["status"] == "failed" and record["token"] == "told"
            if told or record["status"] == "handed":
                assert plan.collection is not None
                plan.collection.skip(group, completed=not told, failed=told)

    def see(self) -> None:
        plans = {plan.id: plan for plan in self.plans}
        for client in CLIENTS:
            for shard, entry in self.results(client):
                plans[entry.batch].seen[shard, entry.entry] = entry

    def collect(self, client: str) -> None:
        self.see()
        plans = {plan.id: plan for plan in self.plans if plan.process is self.processes[client] and not plan.over}
        for shard, entry in list(self.results(client)):
            plan = plans.get(entry.batch)
            if plan is None and not self.raw("EXISTS", self.keys.batch(entry.batch)):
                self.run(self.processes[client].transitions.handed("-", shard, [], {entry.entry: 0}))
            for handover in plan.collection.add(entry) if plan and plan.collection else ():
                self.run(self.processes[client].transitions.handed(*handover))
        for plan in plans.values():
            for group, record in self.records(plan).items() if plan.collection else ():
                if record["status"] == "abandoned":
                    assert plan.collection is not None
                    plan.collection.fail(group, ABANDONED)

    def hand_over(self, plan: Plan, groups: Sequence[int]) -> None:
        for handover in plan.collection.hand_over(groups) if plan.collection else ():
            if handover.entries:
                self.run(plan.process.transitions.handed(*handover))

    def close(self, plan: Plan) -> Books | None:
        queued: dict[str, list[str]] = {shard: [] for shard in plan.shards}
        for group, entry in plan.entries.items():
            if plan.collection is None or not plan.collection.ended(group):
                queued[plan.groups[group].shard].append(entry)
        books = self.run(plan.process.transitions.close(plan.id, queued))
        plan.over = True
        for handover in plan.collection.leftovers() if plan.collection else ():
            self.run(plan.process.transitions.handed(*handover))
        return books

    # What workers do.
    def read(self, hands: Hands) -> bool:
        if not self.raw("EXISTS", self.keys.groups(hands.shard)):
            self.run(hands.transitions.prepare())
        reply = self.raw(*hands.transitions.read_command(1, None))
        found: list[Any] = reply[0][1] if reply else []
        hands.given += [parse_group(*raw) for raw in found]
        return bool(found)

    def claim(self, hands: Hands, *, observing: bool, limit: int = 2, peers: Sequence[str] = ()) -> bool:
        claimed = self.run(hands.transitions.claim(limit, observing=observing, peers=peers))
        found = self.run(hands.transitions.fetch(claimed.entries))
        hands.given += [parse_group(*raw) for raw in found]
        return bool(claimed.entries)

    def take(self, hands: Hands, at: int, *, observing: bool) -> str:
        group, token = hands.given.pop(at % len(hands.given)), next(self._tokens)
        before = self.digest() if self.pending(hands.shard).get(group.entry) != hands.consumer else None
        taken = self.run(hands.transitions.take(group, token, observing=observing, crash_limit=4))
        if before is not None:
            self.check_same(before, f"take of another's delivery {group.batch} {group.group} {taken.status}")
        if taken.status == "unknown":
            self.run(hands.transitions.set_aside(group.entry, "unknown"))
        if taken.status == "ok":
            self.attempts.append((hands, Attempt(group, token, taken.attempt)))
        return taken.status

    def is_current(self, batch: str, group: int, token: str) -> bool:
        """Whether this attempt's steps may change anything."""
        plan = next(plan for plan in self.plans if plan.id == batch)
        record = self.records(plan).get(group)
        return record is not None and record["status"] == "running" and record["token"] == token

    def may_change(self, sent: Sent) -> bool:
        """Whether any of these steps is a current attempt's, the owner's, or one that has no such bound."""
        return any(self._may_change(name, words, sent) for name, words in sent.calls)

    def _may_change(self, name: str, words: Sequence[str], sent: Sent) -> bool:
        if name in _TOKEN_AT:
            return self.is_current(words[0], int(words[1]), words[_TOKEN_AT[name]])
        if name in _OWNER_AT:
            owners = {self.raw("HGET", self.keys.batch(batch), "owner") for batch in sent.batches}
            return None in owners or words[_OWNER_AT[name]].encode() in owners
        return True

    def check_same(self, before: dict[str, Any], what: object) -> None:
        after = self.digest()
        changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
        assert not changed, (what, {name: (before.get(name), after.get(name)) for name in changed})

    def deliverable(self, shard: str) -> set[tuple[str, str]]:
        """Batch and group of what is on the stream and comes to somebody: new, under a lease, due some time."""
        keys = self.keys
        if not self.raw("EXISTS", keys.groups(shard)):
            return set()
        pending = self.pending(shard)
        aside = [member.decode().split(" ")[2] for member in self.raw("ZRANGE", keys.delayed(shard), 0, -1)]
        aside += [member.decode().split(" ")[2] for member in self.raw("ZRANGE", keys.parked(shard), 0, -1)]
        assert not pending.keys() & set(aside), "what was set aside is not pending"
        entries = {entry: dict(zip(w[::2], w[1::2], strict=True)) for entry, w in self.stream(keys.groups(shard))}
        last = dict(pairs(self.raw("XINFO", "GROUPS", keys.groups(shard))[0]))[b"last-delivered-id"]
        coming = {*aside, *pending, *(entry for entry in entries if _id(entry) > _id(last.decode()))}
        return {(w[b"batch"].decode(), w[b"group"].decode()) for entry, w in entries.items() if entry in coming}

    def check_nothing_left(self) -> None:
        over = {plan.id for plan in self.plans if plan.over}
        names = self.names()
        assert not [name for name in names if name.split(":")[-1] in over], names
        for shard in SHARDS:
            assert self.stream(self.keys.groups(shard)) == []
            assert self.pending(shard) == {}
        assert not [name for name in names if name.startswith(("delayed", "parked"))], names
        assert not [
            name for name in names if name not in ("events", "dead") and self.raw("PTTL", self.keys.prefix + name) <= 0
        ]
        for client in CLIENTS:
            assert not [entry for _, entry in self.results(client) if entry.batch in over and entry.kind != "cancelled"]


def _id(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)

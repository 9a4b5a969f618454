"""The fleet's steps on the broker: one fleet per run, the route map, the shards' records, and what others ask of it.

A fleet holds the run by a lease with its incarnation. What it publishes is one step with the lease, so nobody reads
half of it, and a broker that lost it gets it again. `request_scale` and `request_drain` reach a running fleet from any
process: a wish stands in the hash `fleet:requests` under its subject until the fleet has carried it out and put its
answer beside it, whatever process dies meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from .channel import Command, Link, raise_first_error
from .errors import FleetError
from .keys import Keys
from .scripts import SCRIPTS, load_scripts
from .settings import BrokerSettings
from .shard_records import ShardRecord, parse_record
from .steps import Runner, ask, run_step
from .wording import excerpt

DONE: Final = "ok"
# Starting a stack may take half an hour; whoever asked hears of it then, or of the fleet's end much sooner.
REQUEST_TIMEOUT_S: Final = 1800.0
# As in prelude.lua.
EVENTS_KEPT: Final = 20_000
DETAIL_CHARS: Final = 300
_POLL_S = 0.1


@dataclass(frozen=True)
class Published:
    """What a fleet publishes: route → shard, and each shard's record."""

    routes: Mapping[str, str] = field(default_factory=dict[str, str])
    shards: Mapping[str, ShardRecord] = field(default_factory=dict[str, ShardRecord])

    @property
    def version(self) -> str:
        """`ROUTES.RECORDS`. The first part is equal for equal routes, so that a fleet started again on the same plan
        leaves open batches alone; both are for what the broker has, that it never keeps an older record.
        """
        records = [(name, record.model_dump_json()) for name, record in self.shards.items()]
        return f"{_digest(self.routes.items())}.{_digest(records)}"


def _digest(pairs: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(sorted(pairs)).encode()).hexdigest()[:12]


class Request(NamedTuple):
    """A wish: `subject` names what it is about (`scale:SHARD`, `drain:LABEL`), `replicas` only for `scale`."""

    id: str
    subject: str
    replicas: int = 0

    @property
    def verb(self) -> str:
        return self.subject.partition(":")[0]

    @property
    def target(self) -> str:
        return self.subject.partition(":")[2]


class Renewal(NamedTuple):
    """What `renew` said: ok, lost (with the words of the new holder) or gone (publish again); and the wishes that
    stand.
    """

    status: str
    holder: str = ""
    requests: Sequence[Request] = ()


class FleetTransitions:
    """One fleet's steps over `runner`. `holder` says in words who it is, for whoever is refused."""

    def __init__(self, runner: Runner, keys: Keys, settings: BrokerSettings, holder: str) -> None:
        self.incarnation = secrets.token_hex(8)
        self._runner = runner
        self._keys = keys
        self._settings = settings
        self._holder = holder
        self._answers: dict[str, str] = {}

    async def claim(self) -> None:
        """Take the run's lease; raises `FleetError` that names the fleet that has it."""
        reply = await self._call("fleet_claim", [self._keys.fleet], self._holder, self._settings.lease_ms)
        if reply[0] != b"ok":
            raise _taken(self._keys, self._settings, reply[1])

    async def publish(self, published: Published, *, replace: bool = False) -> None:
        """Publish everything with the lease, taking it from another fleet where `replace` says so.

        Raises `FleetError` when another fleet has the run, or when the routes would change under an open batch.
        """
        keys, at = self._keys, self._settings
        words = [word for pair in published.routes.items() for word in pair]
        for name, record in published.shards.items():
            words += [name, record.model_dump_json()]
        reply = await self._call(
            "fleet_publish", [keys.fleet, keys.routes, keys.shards, keys.fleet_requests],
            self._holder, at.lease_ms, at.key_ttl_ms, int(replace), keys.prefix, published.version,
            len(published.routes), *words,
        )  # fmt: skip
        if reply[0] == b"taken":
            raise _taken(self._keys, self._settings, reply[1])
        if reply[0] == b"batches":
            batch = reply[1].decode().removeprefix(keys.batch(""))
            raise FleetError(
                f"run {keys.run!r} has open batches, {batch} among them, and this fleet hosts other routes than "
                f"they were published with; wait until they end, cancel them (`rolloutbus cancel {batch}`), or use "
                "another run"
            )

    async def renew(self, shards: Sequence[str], version: str) -> Renewal:
        """Sign of life for the lease and all keys of the fleet; brings what is asked of it."""
        at = self._settings
        reply = await self._call(
            "fleet_renew", self._all_keys(shards), self._holder, at.lease_ms, at.key_ttl_ms, version
        )  # fmt: skip
        pairs = iter(reply[2:])
        wanted = zip(pairs, pairs, strict=True)
        return Renewal(
            reply[0].decode(), reply[1].decode(), [r for name, raw in wanted if (r := _parse(name, raw)) is not None]
        )

    async def answer(self, request: Request, outcome: str) -> None:
        """Tell whoever asked: `DONE`, or why not."""
        self._answers[request.id] = outcome
        command = SCRIPTS["fleet_answer"].call(
            [self._keys.fleet_requests], request.subject, request.id, outcome, self._settings.key_ttl_ms
        )
        await run_step(self._runner, command)

    async def answer_again(self, request: Request) -> None:
        """Repeat the answer to a request that stands although it was answered: the broker has lost its last moment."""
        if request.id in self._answers:
            await self.answer(request, self._answers[request.id])

    async def remove(self, shards: Sequence[str], labels: Sequence[str], version: str) -> int:
        """Take the fleet's keys off the broker, but for those that another fleet has now, and for routes that are not
        those of `version` ("" where it has published none); the number of shards whose streams still hold work.
        """
        reply = await self._call("fleet_remove", self._all_keys(shards), self._keys.prefix, version, *labels)
        return int(reply[1])

    async def bury(self, shard: str, label: str, consumer: str, incarnation: str) -> int:
        """An instance's process is dead: what it held may be taken over at once, and its label shows no life. Groups it
        held.
        """
        groups = self._keys.groups(shard)
        held = await run_step(self._runner, SCRIPTS["revoke"].call([groups], consumer, self._settings.lease_ms))
        await run_step(self._runner, SCRIPTS["leave"].call([groups, self._keys.instance(label)], consumer, incarnation))
        return int(held[0])

    async def note(self, kind: str, label: str, detail: str) -> None:
        """Put what happened to an instance beside what happened to groups; the record is capped."""
        fields = (
            "kind",
            kind,
            "batch",
            "-",
            "group",
            "-",
            "attempt",
            0,
            "instance",
            label,
            "detail",
            excerpt(detail, DETAIL_CHARS),
        )
        raise_first_error(
            await self._runner.run([("XADD", self._keys.events, "MAXLEN", "~", EVENTS_KEPT, "*", *fields)])
        )

    async def _call(self, script: str, keys: Sequence[str], *args: str | int) -> Any:
        command: Command = SCRIPTS[script].call(keys, self.incarnation, *args)
        return (await run_step(self._runner, command))[0]

    def _all_keys(self, shards: Sequence[str]) -> list[str]:
        keys = self._keys
        mine = [keys.fleet, keys.routes, keys.shards, keys.fleet_requests]
        for shard in shards:
            mine += [keys.groups(shard), keys.delayed(shard), keys.parked(shard)]
        return mine


async def require_free(runner: Runner, keys: Keys, settings: BrokerSettings) -> None:
    """Raise the `FleetError` that `claim` would now. It is the claim that decides; this is for whoever has much to
    start before.
    """
    (holder,) = await ask(runner, [("GET", keys.fleet)])
    if holder is not None:
        raise _taken(keys, settings, holder)


def _taken(keys: Keys, settings: BrokerSettings, words: bytes) -> FleetError:
    holder = words.decode().partition(" ")[2] or "unknown"
    return FleetError(
        f"run {keys.run!r} has a fleet already ({holder}); shut it down, use another run, or take its place with "
        f"`rolloutbus up --replace` (replace=True). A fleet that died gives the run free after {settings.lease_s:g} s"
    )


def _nothing() -> None: ...


def _parse(name: bytes, raw: bytes) -> Request | None:
    """The wish in a field of the requests; what nobody of ours wrote is one that the fleet will refuse, or none."""
    kind, _, subject = name.decode(errors="replace").partition(":")
    if kind != "want":
        return None
    identity, _, replicas = raw.decode(errors="replace").partition(" ")
    return Request(identity, subject, int(replicas or 0) if replicas.isdecimal() or not replicas else -1)


def request_scale(
    settings: BrokerSettings,
    run: str,
    shard: str,
    replicas: int,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    asked: Callable[[], object] = _nothing,
) -> None:
    """Ask the run's fleet, from any process, for `replicas` instances of `shard`, and wait until they are there.

    Calls `asked` once the request stands. Raises `FleetError` with the fleet's reason, or when it does not answer in
    time. For plain code; blocks.
    """
    request = Request(secrets.token_hex(6), f"scale:{shard}", replicas)
    asyncio.run(_request_over_link(settings, run, request, timeout_s, asked))


def request_drain(
    settings: BrokerSettings,
    run: str,
    label: str,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    asked: Callable[[], object] = _nothing,
) -> None:
    """Ask the run's fleet, from any process, to drain the instance `label` and stop it; waits until it is gone.

    Calls `asked` once the request stands. Raises `FleetError` with the fleet's reason, or when it does not answer in
    time. For plain code; blocks.
    """
    request = Request(secrets.token_hex(6), f"drain:{label}")
    asyncio.run(_request_over_link(settings, run, request, timeout_s, asked))


async def _request_over_link(
    settings: BrokerSettings, run: str, request: Request, timeout_s: float, asked: Callable[[], object]
) -> None:
    link = Link(settings, "fleet-request", load_scripts)
    try:
        await ask_fleet(link, Keys(run), settings, request, timeout_s, asked)
    finally:
        await link.close()


async def _check_subject(runner: Runner, keys: Keys, subject: str) -> None:
    """A name that nobody has is refused at once: the fleet may be busy with an earlier request for minutes."""
    kind, _, name = subject.partition(":")
    flat = (await runner.run([("HGETALL", keys.shards)]))[0]
    records = {shard.decode(): parse_record(raw) for shard, raw in zip(flat[::2], flat[1::2], strict=True)}
    labels = [label for shard, record in records.items() if record for label in record.instances(shard)]
    known = labels if kind == "drain" else list(records)
    if records and name not in known:
        what = "instance" if kind == "drain" else "shard"
        raise FleetError(f"{kind} {name}: there is no {what} {name!r}; there are {', '.join(sorted(known))}")


async def ask_fleet(
    link: Link,
    keys: Keys,
    settings: BrokerSettings,
    request: Request,
    timeout_s: float,
    asked: Callable[[], object] = _nothing,
) -> None:
    """Put a request to the fleet and wait for its answer; the asyncio form of `request_scale` and `request_drain`.

    A fleet whose lease is not there may only be about to renew it, after a broker's restart: it is gone when this
    process has seen the broker for a whole lease.
    """
    await _check_subject(link, keys, request.subject)
    command = SCRIPTS["fleet_request"].call(
        [keys.fleet, keys.fleet_requests], request.subject, request.id, str(request.replicas), settings.key_ttl_ms
    )
    deadline = time.monotonic() + timeout_s
    while (await run_step(link, command))[0][0] != b"ok":
        if link.watched_for(settings.lease_s) or time.monotonic() >= deadline:
            raise FleetError(
                f"no fleet runs for run {keys.run!r}; start one with `rolloutbus up`, or check the run's name and "
                "broker"
            )
        await asyncio.sleep(_POLL_S)
    asked()
    while True:
        looked = ("HMGET", keys.fleet_requests, f"answer:{request.id}", f"want:{request.subject}")
        (answer, wanted), alive = await link.run([looked, ("EXISTS", keys.fleet)])
        if answer is not None:
            await link.run([("HDEL", keys.fleet_requests, f"answer:{request.id}")])
            return _judge(request, answer.decode())
        if not alive and link.watched_for(settings.lease_s):
            raise FleetError(
                f"the fleet of run {keys.run!r} went away before it answered ({request.subject}); start it again "
                "and repeat"
            )
        if alive and (wanted or b"").split(b" ")[0].decode() != request.id:
            raise FleetError(
                f"the broker of run {keys.run!r} has lost the request {request.subject}, or the run has another fleet "
                "now; see `rolloutbus status` whether it was carried out, and repeat it if not"
            )
        if time.monotonic() >= deadline:
            raise FleetError(
                f"the fleet of run {keys.run!r} has not finished {request.subject} within {timeout_s:g} s; it goes on "
                "with it, and `rolloutbus status` shows how far it is"
            )
        await asyncio.sleep(_POLL_S)


def _judge(request: Request, answer: str) -> None:
    if answer != DONE:
        raise FleetError(f"{request.verb} {request.target}: {answer}")

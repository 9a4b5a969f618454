"""The fleet's steps on the broker: one fleet per run, the route map, the shards' records, and what others ask of it.

A fleet holds the run by a lease with its incarnation. What it publishes is one step with the lease, so nobody reads
half of it, and a broker that lost it gets it again. `fleet_requests.py` is the side of those who ask.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from .channel import Command, raise_first_error
from .errors import FleetError
from .fleet_requests import Request, read_requests
from .keys import Keys
from .scripts import SCRIPTS
from .settings import BrokerSettings
from .shard_records import ShardRecord
from .steps import Runner, ask, run_step
from .wording import excerpt

# As in prelude.lua.
EVENTS_KEPT: Final = 20_000
DETAIL_CHARS: Final = 300


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
        return Renewal(reply[0].decode(), reply[1].decode(), read_requests(reply[2:]))

    async def answer(self, request: Request, outcome: str) -> None:
        """Tell whoever asked: `fleet_requests.DONE`, or why not."""
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

"""Asking a run's fleet, from any process, for another number of instances or the end of one, and waiting for it.

A wish stands in the hash `fleet:requests` under its subject until the fleet has carried it out and put its answer
beside it, whatever process dies meanwhile. A fleet does one thing after the other, which may take it half an hour: so
what the broker's own records show to be a mistake is refused before it is asked, and whoever waits hears what for.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from .channel import Link
from .errors import FleetError
from .keys import Keys
from .scripts import SCRIPTS, load_scripts
from .settings import BrokerSettings
from .shard_records import ShardRecord, parse_record
from .steps import Runner, ask, run_step
from .wording import did_you_mean

DONE: Final = "ok"
# Starting a stack may take half an hour; whoever asked hears of it then, or of the fleet's end much sooner.
REQUEST_TIMEOUT_S: Final = 1800.0
# A drain of an idle instance is done within this time and needs no remark.
TOLD_AFTER_S: Final = 2.0
TOLD_EVERY_S: Final = 30.0
_POLL_S = 0.1


class Request(NamedTuple):
    """A wish: `subject` names what it is about (`scale:SHARD`, `drain:LABEL`), `replicas` only for `scale`."""

    id: str
    subject: str
    replicas: int = 0

    @classmethod
    def to_scale(cls, shard: str, replicas: int) -> Request:
        """A wish for `replicas` instances of `shard`."""
        return cls(secrets.token_hex(6), f"scale:{shard}", replicas)

    @classmethod
    def to_drain(cls, label: str) -> Request:
        """A wish that the instance `label` hands its groups back and ends."""
        return cls(secrets.token_hex(6), f"drain:{label}")

    @property
    def verb(self) -> str:
        return self.subject.partition(":")[0]

    @property
    def target(self) -> str:
        return self.subject.partition(":")[2]

    @property
    def words(self) -> str:
        """As it is typed: `scale math 3`, `drain math/1`."""
        return f"{self.verb} {self.target} {self.replicas or ''}".rstrip()


def read_requests(flat: Sequence[bytes]) -> list[Request]:
    """The wishes among the fields of `fleet:requests`; what nobody of ours wrote is one that the fleet will refuse, or
    none.
    """
    found = (_parse(name, raw) for name, raw in zip(flat[::2], flat[1::2], strict=True))
    return [request for request in found if request is not None]


def _parse(name: bytes, raw: bytes) -> Request | None:
    kind, _, subject = name.decode(errors="replace").partition(":")
    if kind != "want":
        return None
    identity, _, replicas = raw.decode(errors="replace").partition(" ")
    return Request(identity, subject, int(replicas or 0) if replicas.isdecimal() or not replicas else -1)


def no_instance(label: str, labels: Collection[str]) -> str:
    """What is wrong with a label that none of `labels` is."""
    there = ", ".join(sorted(labels))
    return f"there is no instance {label!r}{did_you_mean(label, labels)}; there are {there}"


def last_instance(label: str, shard: str) -> str:
    """Why the only instance of a shard is not drained."""
    return f"{label} is the last instance of shard {shard}; scale it up first, or shut the fleet down"


def mistake_in(
    request: Request, records: Mapping[str, ShardRecord], standing: Collection[str] = (), *, lives: bool = False
) -> str | None:
    """What the shards' records show to be wrong with a wish, or None where only the fleet can tell.

    `standing` are the subjects of other wishes, which may make right what is wrong now; `lives` says that an instance
    of that label is there, whatever the records say: one that was just added is not in them yet.
    """
    name, labels = request.target, {label: shard for shard, r in records.items() for label in r.instances(shard)}
    if request.verb == "scale" and name not in records:
        return f"there is no shard {name!r}{did_you_mean(name, records)}; there are {', '.join(sorted(records))}"
    if request.verb != "drain":
        return None
    if (shard := labels.get(name)) is not None:
        alone = len(records[shard].instances(shard)) == 1 and f"scale:{shard}" not in standing
        return last_instance(name, shard) if alone else None
    if lives:
        return None
    if name in records:
        of_it = ", ".join(records[name].instances(name)) or "none"
        return f"{name} is a shard, and no instance of it is called so; its instances: {of_it}"
    return no_instance(name, labels)


def request_change(
    settings: BrokerSettings,
    run: str,
    request: Request,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    asked: Callable[[], object] = lambda: None,
    waiting: Callable[[str], object] = lambda words: None,
) -> None:
    """`ask_fleet` for plain code, over a connection of its own; blocks until the wish is carried out."""

    async def work() -> None:
        link = Link(settings, "fleet-request", load_scripts)
        try:
            await ask_fleet(link, Keys(run), settings, request, timeout_s, asked, waiting)
        finally:
            await link.close()

    asyncio.run(work())


async def ask_fleet(
    link: Link,
    keys: Keys,
    settings: BrokerSettings,
    request: Request,
    timeout_s: float,
    asked: Callable[[], object] = lambda: None,
    waiting: Callable[[str], object] = lambda words: None,
) -> None:
    """Put a wish to the run's fleet and wait until it is carried out.

    Calls `asked` once it stands, and `waiting` with what it waits for after two seconds and then every thirty. Raises
    `FleetError` for a name that nobody has, with the fleet's own reason, or when it does not answer in time.
    """
    asking = _Asking(link, keys, settings, request, timeout_s, waiting)
    await asking.put()
    asked()
    if (answer := await asking.answer()) != DONE:
        raise _refused(request, answer)


class _Asking:
    """One wish on its way.

    A fleet whose lease is not there may only be about to renew it, after a broker's restart: it is gone when this
    process has seen the broker for a whole lease.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        settings: BrokerSettings,
        request: Request,
        timeout_s: float,
        waiting: Callable[[str], object],
    ) -> None:
        self._link = link
        self._keys = keys
        self._settings = settings
        self._request = request
        self._timeout_s = timeout_s
        self._waiting = waiting
        self._began = time.monotonic()
        self._next_word_s = TOLD_AFTER_S

    async def put(self) -> None:
        """Until the wish stands; a mistake is told instead."""
        keys, request = self._keys, self._request
        command = SCRIPTS["fleet_request"].call(
            [keys.fleet, keys.fleet_requests],
            request.subject,
            request.id,
            str(request.replicas),
            self._settings.key_ttl_ms,
        )
        while True:
            await _refuse_mistakes(self._link, keys, request)
            if (await run_step(self._link, command))[0][0] == b"ok":
                return
            if self._gone or self._late:
                raise FleetError(
                    f"no fleet runs for run {keys.run!r}; start one with `rolloutbus up`, or check the run's name and "
                    "broker"
                )
            await self._pause()

    async def answer(self) -> str:
        """The fleet's answer; raises where none will come, or none has come in time."""
        keys, request = self._keys, self._request
        looked = ("HMGET", keys.fleet_requests, f"answer:{request.id}", f"want:{request.subject}")
        while True:
            (answer, wanted), alive = await ask(self._link, [looked, ("EXISTS", keys.fleet)])
            if answer is not None:
                await self._link.run([("HDEL", keys.fleet_requests, f"answer:{request.id}")])
                return answer.decode()
            self._expect_an_answer(alive=bool(alive), wanted=wanted)
            await self._pause()

    def _expect_an_answer(self, *, alive: bool, wanted: bytes | None) -> None:
        run, subject = self._keys.run, self._request.subject
        if not alive and self._gone:
            raise FleetError(
                f"the fleet of run {run!r} went away before it answered ({subject}); start it again and repeat"
            )
        if alive and (wanted or b"").split(b" ")[0].decode() != self._request.id:
            raise FleetError(
                f"the broker of run {run!r} has lost the request {subject}, or the run has another fleet now; see "
                "`rolloutbus status` whether it was carried out, and repeat it if not"
            )
        if self._late:
            raise FleetError(
                f"the fleet of run {run!r} has not finished {subject} within {self._timeout_s:g} s; it goes on with "
                "it, and `rolloutbus status` shows how far it is"
            )

    @property
    def _gone(self) -> bool:
        """Whether a fleet that is not seen now is none."""
        return self._link.watched_for(self._settings.lease_s)

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self._began + self._timeout_s

    async def _pause(self) -> None:
        waited_s = time.monotonic() - self._began
        if waited_s >= self._next_word_s:
            self._next_word_s = waited_s + TOLD_EVERY_S
            self._waiting(await self._what_for(f"{waited_s:.0f} s so far"))
        await asyncio.sleep(_POLL_S)

    async def _what_for(self, so_far: str) -> str:
        """In words. Which of several wishes the fleet has begun with it does not say, and neither does this."""
        keys, mine = self._keys, self._request
        holder, flat = await ask(self._link, [("GET", keys.fleet), ("HGETALL", keys.fleet_requests)])
        if holder is None:
            lease_s = f"{self._settings.lease_s:g} s"
            return (
                f"run {keys.run} has no fleet now; one that lives is back within {lease_s}, waiting for it ({so_far})"
            )
        others = [wish.words for wish in read_requests(flat) if wish.id != mine.id]
        fleet = holder.decode(errors="replace").partition(" ")[2] or "unknown"
        also = f"; it was asked to {', '.join(others)} too" if others else ""
        return f"waiting for the fleet on {fleet}, to {mine.words} ({so_far}){also}"


async def _refuse_mistakes(runner: Runner, keys: Keys, request: Request) -> None:
    """Raise `FleetError` for what is known to be wrong. Without a fleet, records are what a former one left."""
    alive, records, wishes, lives = await ask(
        runner,
        [
            ("EXISTS", keys.fleet),
            ("HGETALL", keys.shards),
            ("HGETALL", keys.fleet_requests),
            ("EXISTS", keys.instance(request.target)),
        ],
    )
    known = {shard.decode(): parse_record(raw) for shard, raw in zip(records[::2], records[1::2], strict=True)}
    sound = {shard: record for shard, record in known.items() if record is not None}
    if not alive or not sound or len(sound) < len(known):
        return
    standing = {wish.subject for wish in read_requests(wishes)}
    if (mistake := mistake_in(request, sound, standing, lives=bool(lives))) is not None:
        raise _refused(request, mistake)


def _refused(request: Request, why: str) -> FleetError:
    return FleetError(f"{request.verb} {request.target}: {why}")

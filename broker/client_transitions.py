"""The client's atomic steps, each the typed face of one Lua script of the same name, and the producer's publish.

Every step carries the client's incarnation; a process that lost its name to another is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .channel import Arg, Payload
from .errors import BatchCancelledError, OwnershipLostError, RolloutBusError, UnknownBatchError, UsageError
from .keys import Keys
from .messages import Failure, ReplayOrigin, group_fields
from .scripts import SCRIPTS
from .settings import BrokerSettings
from .steps import Runner, Step, run_step, run_steps


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """What the broker must know of a batch before its first group."""

    batch: str
    groups: int
    rows: int
    group_size: int
    shards: tuple[str, ...]
    layout: str = "[]"


class OutgoingGroup(NamedTuple):
    """One group ready to be published."""

    batch: str
    group: int
    shard: str
    route: str
    rows: int
    first_row: int
    payload: Payload
    origin: ReplayOrigin | None = None


class Published(NamedTuple):
    """ok or repeated (it is on the stream); the entry's id where known; bytes queued for this batch on this shard."""

    status: str
    entry: str
    queued_bytes: int


class Books(NamedTuple):
    """How a batch's groups ended, and what happened on the way."""

    published: int
    completed: int
    failed: int
    cancelled: int
    duplicate_rows: int = 0
    stale_writes: int = 0
    redeliveries: int = 0
    retries: int = 0
    dead_groups: int = 0

    @property
    def balanced(self) -> bool:
        return self.published == self.completed + self.failed + self.cancelled


class ClientTransitions:
    """One client's steps over `runner`, under the name `client` and this process's `incarnation`."""

    def __init__(self, runner: Runner, keys: Keys, settings: BrokerSettings, client: str, incarnation: str) -> None:
        self._runner = runner
        self._keys = keys
        self._settings = settings
        self.client = client
        self.incarnation = incarnation

    async def own(self, *, watched_s: float | None = None) -> int:
        """Acquire or renew the client's lease: 0 when it is ours, else the ms another process still has.

        `watched_s`: how long the broker has been running; for one lease after its start another's absence means
        nothing.
        """
        lease_ms = self._settings.lease_ms
        command = SCRIPTS["own"].call(
            [self._keys.owner(self.client)],
            self.incarnation,
            lease_ms,
            self._settings.key_ttl_ms,
            lease_ms if watched_s is None else int(watched_s * 1000),
        )
        return (await run_step(self._runner, command))[0][1]

    async def resign(self, shards: Sequence[str]) -> None:
        """Give the name up and remove the client's result streams."""
        keys = [self._keys.owner(self.client), *(self._keys.results(self.client, shard) for shard in shards)]
        await run_step(self._runner, SCRIPTS["resign"].call(keys, self.incarnation))

    async def open(self, spec: BatchSpec) -> str:
        """Create the batch and the streams it needs; ok, or repeated when it is there already."""
        keys = [self._keys.batch(spec.batch), self._keys.owner(self.client)]
        for shard in spec.shards:
            keys += [self._keys.groups(shard), self._keys.results(self.client, shard)]
        command = SCRIPTS["open"].call(
            keys, self.incarnation, self.client, self._settings.key_ttl_ms, spec.groups, spec.rows, spec.group_size,
            self._settings.max_unread_bytes, " ".join(spec.shards),
            spec.layout,
        )  # fmt: skip
        status = (await run_step(self._runner, command))[0][0].decode()
        return self._check(status, spec.batch, ("ok", "repeated"))

    async def make_results(self, shards: Sequence[str]) -> list[str]:
        """Make the result streams of `shards` again that somebody deleted; of which shards they were."""
        keys = [self._keys.owner(self.client), *(self._keys.results(self.client, shard) for shard in shards)]
        command = SCRIPTS["make_results"].call(keys, self.incarnation, self._settings.key_ttl_ms)
        return [shards[int(place)] for place in (await run_step(self._runner, command))[0][1:]]

    async def forget_unread(self, batch: str, shards: Sequence[str]) -> None:
        """Where the result streams of the batch's `shards` are empty, nothing of it counts as unread any more."""
        keys = [self._keys.batch(batch), *(self._keys.results(self.client, shard) for shard in shards)]
        await run_step(self._runner, SCRIPTS["forget_unread"].call(keys, self.incarnation))

    async def publish(self, groups: Sequence[OutgoingGroup]) -> list[Published | RolloutBusError]:
        """Publish groups in one write, each once; per group what came of it, or the error that refused it."""
        answers = await run_steps(self._runner, [self._publish_step(group) for group in groups])
        out: list[Published | RolloutBusError] = []
        for group, answer in zip(groups, answers, strict=True):
            if isinstance(answer, RolloutBusError):
                out.append(answer)
            elif isinstance(answer, Exception):
                raise answer
            else:
                out.append(self._published(group, answer[0], answer[1]))
        return out

    def _published(
        self, group: OutgoingGroup, entry: bytes | None, reply: list[bytes | int]
    ) -> Published | RolloutBusError:
        status = bytes(reply[0]).decode()  # pyright: ignore[reportArgumentType]
        if status == "no-stream":
            return Published(status, "", 0)
        try:
            self._check(status, group.batch, ("ok", "repeated"))
        except RolloutBusError as error:
            return error
        return Published(status, entry.decode() if entry and status == "ok" else "", int(reply[1]))

    def _publish_step(self, group: OutgoingGroup) -> Step:
        fields = group_fields(
            group.batch, group.group, self.client, group.route, group.rows, group.first_row, group.payload, group.origin
        )
        stream = self._keys.groups(group.shard)
        return [
            ("XADD", stream, "NOMKSTREAM", "*", *fields),
            SCRIPTS["publish"].call(
                [self._keys.batch(group.batch), stream, self._keys.events],
                self.incarnation,
                group.batch,
                group.group,
                group.payload.size,
            ),
        ]

    async def restore(self, batch: str, group_size: int, ended: Mapping[int, str]) -> None:
        """Tell a broker that lost its data of groups that have `ended`: handed, done (the results are lost there),
        failed, or told (the trainer has had its failure). What it knows better stays.
        """
        command = SCRIPTS["restore"].call(
            [self._keys.batch(batch)],
            self.incarnation,
            group_size,
            *itertools.chain.from_iterable(ended.items()),
        )
        self._check((await run_step(self._runner, command))[0][0].decode(), batch, ("ok",))

    async def seal(self, batch: str, checksums: str = "") -> str:
        """Say that all groups are published. `checksums` of their rows, where known, are for whoever resumes it."""
        command = SCRIPTS["seal"].call([self._keys.batch(batch)], self.incarnation, checksums)
        status = (await run_step(self._runner, command))[0][0].decode()
        return self._check(status, batch, ("ok", "unfinished"))

    async def adopt(self, batch: str) -> None:
        """Take a sealed batch of this client's former process over; `UsageError` for another client's."""
        command = SCRIPTS["adopt"].call(
            [self._keys.batch(batch), self._keys.owner(self.client)], self.incarnation, self.client
        )
        status, *words = [word.decode() for word in (await run_step(self._runner, command))[0]]
        if status == "foreign":
            raise UsageError(
                f"batch {batch} belongs to client {words[0]!r}, and this client is {self.client!r}; resume it with a "
                f"client of that name"
            )
        if status == "open":
            raise UnknownBatchError(
                f"batch {batch} was never sealed: its publishing did not finish, so it can only be cancelled"
            )
        self._check(status, batch, ("ok",))

    async def handed(self, batch: str, shard: str, groups: Sequence[int], entries: Mapping[str, int]) -> str:
        """The trainer has these groups; their result entries (id → bytes that counted as unread) go."""
        command = SCRIPTS["handed"].call(
            [
                self._keys.batch(batch),
                self._keys.results(self.client, shard),
                self._keys.groups(shard),
                self._keys.events,
            ],
            self.incarnation,
            sum(entries.values()),
            ",".join(map(str, groups)),
            *entries,
        )
        return (await run_step(self._runner, command))[0][0].decode()

    async def expire(
        self, shard: str, group: OutgoingGroup, entry: str, reason: str, timeout_s: float, failure: Failure
    ) -> str:
        """End a group that nobody will finish. `reason`: deadline, `timeout_s` since its first take; no_instance, where
        one that runs was not renewed for `timeout_s`; vanished.
        """
        keys = self._keys
        command = SCRIPTS["expire"].call(
            [keys.batch(group.batch), keys.groups(shard), keys.delayed(shard), keys.parked(shard),
             keys.results(self.client, shard), keys.dead, keys.events],
            group.batch, group.group, group.route, entry or "-", group.first_row, group.rows, self.incarnation, reason,
            int(timeout_s * 1000), failure.packed(), self._settings.max_dead_bytes,
        )  # fmt: skip
        return (await run_step(self._runner, command))[0][0].decode()

    async def set_aside(self, shard: str, entry: str, reason: str) -> None:
        """Move a stranger's entry from a results stream to the dead letters."""
        keys = [self._keys.results(self.client, shard), self._keys.dead, self._keys.events]
        await run_step(self._runner, SCRIPTS["set_aside"].call(keys, entry, reason, self._settings.max_dead_bytes))

    async def close(self, batch: str, queued: Mapping[str, Sequence[str]]) -> Books | None:
        """End the batch: its keys go, what was queued is dropped. None: it was gone already. `queued`: entry ids per
        shard.
        """
        keys = [self._keys.batch(batch), self._keys.accepted(batch)]
        words: list[Arg] = []
        for place, (shard, entries) in enumerate(queued.items(), start=1):
            keys += [self._keys.groups(shard), self._keys.delayed(shard), self._keys.parked(shard)]
            words += [f"{place}:{entry}" for entry in entries]
        reply = (await run_step(self._runner, SCRIPTS["close"].call(keys, self.incarnation, batch, *words)))[0]
        if reply[0] == b"gone":
            return None
        self._check(reply[0].decode(), batch, ("ok",))
        return Books(*reply[1:])

    def _check(self, status: str, batch: str, fine: tuple[str, ...]) -> str:
        if status in fine:
            return status
        if status == "not-owner":
            raise OwnershipLostError(
                f"client {self.client!r} is held by another process now, so batch {batch} is no longer ours; "
                "end one of the two processes, or give each its own client name"
            )
        if status == "gone":
            raise UnknownBatchError(f"batch {batch} is not on the broker: it was closed, abandoned, or never existed")
        raise BatchCancelledError(
            f"batch {batch} is closed on the broker ({status}): it was cancelled; publish it again if it is wanted"
        )


async def cancel_batch(runner: Runner, keys: Keys, batch: str, client: str, shards: Sequence[str], reason: str) -> int:
    """An operator's cancellation of any batch; how many groups it stopped. Raises `UnknownBatchError`."""
    names = [keys.batch(batch)]
    for shard in shards:
        names += [keys.groups(shard), keys.delayed(shard), keys.parked(shard), keys.results(client, shard)]
    status, stopped = (await run_step(runner, SCRIPTS["cancel"].call(names, batch, reason)))[0]
    if status == b"gone":
        raise UnknownBatchError(
            f"batch {batch} is not on the broker: it was closed, abandoned, or never existed; see `rolloutbus status`"
        )
    return stopped

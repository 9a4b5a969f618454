"""A small run of a few groups for the contract suite: who plays in it, and what is left on the broker."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rolloutbus.broker.channel import Payload, ReplyError
from rolloutbus.broker.client_transitions import BatchSpec, Books, ClientTransitions, OutgoingGroup, Published
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.keys import GROUP_NAME, Keys
from rolloutbus.broker.messages import Failure, GroupEntry, ResultEntry, parse_group, parse_result
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.steps import Runner
from rolloutbus.broker.worker_transitions import (
    Acceptance,
    Accepted,
    Attempt,
    HeldGroup,
    Identity,
    Rows,
    WorkerTransitions,
)

from tests.entries import rows_payload

SHARD = "math"
SIZE = 4
ALL = tuple(range(SIZE))
FAILURE = Failure("infra", "TimeoutError", "too slow", "Traceback …", http_status=503)
RECORD_WORDS = ("status", "attempt", "token", "instance", "entry", "infra", "data", "accepted", "bytes", "first_take")
_names = itertools.count()


def result_rows(*positions: int, text: str = "fine") -> Rows:
    return Rows(positions, rows_payload([{"reward": 1.0, "at": at, "text": text} for at in positions]))


@dataclass
class Batch:
    """A batch as its client knows it."""

    id: str
    client: ClientTransitions
    groups: list[OutgoingGroup]
    entries: dict[int, str] = field(default_factory=dict[int, str])

    def queued(self) -> dict[str, list[str]]:
        return {SHARD: list(self.entries.values())}

    async def close(self) -> Books | None:
        return await self.client.close(self.id, self.queued())


class Stage:
    """One run on one broker. Ages and due times are set and not waited for."""

    def __init__(self, runner: Runner, run: str, **settings: Any) -> None:
        self.runner = runner
        self.keys = Keys(run)
        self.settings = BrokerSettings(**settings)
        self.stream = self.keys.groups(SHARD)
        self.batches: list[Batch] = []

    async def raw(self, *command: Any) -> Any:
        reply = (await self.runner.run([command]))[0]
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def client(self, name: str = "trainer", incarnation: str = "first", **settings: Any) -> ClientTransitions:
        chosen = self.settings.model_copy(update=settings)
        return ClientTransitions(self.runner, self.keys, chosen, name, incarnation)

    def worker(self, label: str = "math/0") -> WorkerTransitions:
        return WorkerTransitions(
            self.runner, self.keys, self.settings, Identity(SHARD, label, secrets.token_hex(3), "host", 1)
        )

    async def opened(self, groups: int = 1, client: ClientTransitions | None = None) -> Batch:
        """A batch that is open, with nothing published yet."""
        client = client or self.client()
        assert await client.own() == 0
        batch_id = f"b{next(_names)}"
        payload = Payload.of([b"rows of a group"])
        batch = Batch(
            batch_id,
            client,
            [OutgoingGroup(batch_id, at, SHARD, "adds", SIZE, at * SIZE, payload) for at in range(groups)],
        )
        assert await client.open(BatchSpec(batch_id, groups, groups * SIZE, SIZE, (SHARD,))) == "ok"
        self.batches.append(batch)
        return batch

    async def sealed(self, groups: int = 1, client: ClientTransitions | None = None) -> Batch:
        """A batch that is published and sealed."""
        batch = await self.opened(groups, client)
        await self.published(batch)
        assert await batch.client.seal(batch.id) == "ok"
        return batch

    async def published(self, batch: Batch, *places: int) -> list[Published]:
        """Publish these groups of the batch, by default all, and keep their entries' ids as a client does."""
        groups = [batch.groups[at] for at in places] or batch.groups
        answers: list[Published] = []
        for group, answer in zip(groups, await batch.client.publish(groups), strict=True):
            assert not isinstance(answer, RolloutBusError), answer
            if answer.entry:
                batch.entries[group.group] = answer.entry
            answers.append(answer)
        return answers

    async def read(self, worker: WorkerTransitions) -> list[Any]:
        """At most one new entry, given to this worker without waiting."""
        command = list(worker.read_command(1, 0))
        at = command.index("BLOCK")
        del command[at : at + 2]
        reply = await self.raw(*command)
        return reply[0][1] if reply else []

    async def delivered(self, worker: WorkerTransitions) -> GroupEntry:
        """The next new entry, given to this worker."""
        found = await self.read(worker)
        assert found, "nothing new on the stream"
        return parse_group(*found[0])

    async def taken(
        self, worker: WorkerTransitions, group: GroupEntry | None = None, *, crash_limit: int = 5
    ) -> Attempt:
        """An attempt of this worker at `group`, by default the next new one."""
        group = group or await self.delivered(worker)
        token = secrets.token_hex(4)
        taken = await worker.take(group, token, observing=True, crash_limit=crash_limit)
        assert taken.status == "ok", taken
        return Attempt(group, token, taken.attempt)

    async def taken_over(self, attempt: Attempt, heir: WorkerTransitions, **options: Any) -> Attempt:
        """The lease of `attempt` expires, and `heir` takes the group."""
        await self.expire_lease(attempt.group)
        return await self.taken(heir, await self.claimed(heir), **options)

    async def claimed(
        self, worker: WorkerTransitions, *, peers: Sequence[str] = (), observing: bool = True
    ) -> GroupEntry:
        """The one group that this worker may run again."""
        found = await worker.fetch((await worker.claim(10, observing=observing, peers=peers)).entries)
        assert len(found) == 1, found
        return parse_group(*found[0])

    async def expire_lease(self, group: GroupEntry) -> None:
        holder = (await self.raw("XPENDING", self.stream, GROUP_NAME, group.entry, group.entry, 1))[0][1]
        idle = self.settings.lease_ms + 1
        await self.raw("XCLAIM", self.stream, GROUP_NAME, holder, 0, group.entry, "IDLE", idle, "JUSTID")

    async def owner_absent(self, seconds: float, client: ClientTransitions) -> None:
        """The client has not renewed its lease for so long."""
        now = await self.raw("TIME")
        renewed = int(now[0]) * 1000 - int(seconds * 1000)
        await self.raw("SET", self.keys.owner(client.client), f"{client.incarnation} {renewed}", "PX", 3_600_000)

    async def accept(self, worker: WorkerTransitions, attempt: Attempt, *rows: Rows, finish: bool = False) -> Accepted:
        answer = (await worker.accept([Acceptance(attempt, rows, finish)]))[0]
        if isinstance(answer, RolloutBusError):
            raise answer
        return answer

    async def finish(self, worker: WorkerTransitions, attempt: Attempt) -> Accepted:
        return await self.accept(worker, attempt, result_rows(*ALL), finish=True)

    async def renew(self, worker: WorkerTransitions, *attempts: Attempt, observing: bool = True) -> list[str] | None:
        held = [HeldGroup(each.group.batch, each.group.entry, each.group.group, each.token) for each in attempts]
        return await worker.renew(held, 64, observing=observing)

    async def results(self, client: str = "trainer") -> list[ResultEntry]:
        found = await self.raw("XRANGE", self.keys.results(client, SHARD), "-", "+")
        return [parse_result(*entry) for entry in found]

    async def record(self, batch: Batch, group: int = 0) -> dict[str, str]:
        raw = await self.raw("HGET", self.keys.batch(batch.id), f"g:{group}")
        return dict(zip(RECORD_WORDS, raw.decode().split(" "), strict=True)) if raw else {}

    async def count(self, batch: Batch, name: str) -> int:
        return int(await self.raw("HGET", self.keys.batch(batch.id), name) or 0)

    async def queued(self) -> list[str]:
        return [entry[0].decode() for entry in await self.raw("XRANGE", self.stream, "-", "+")]

    async def pending(self) -> int:
        return (await self.raw("XPENDING", self.stream, GROUP_NAME))[0]

    async def dead_letters(self) -> list[dict[bytes, bytes]]:
        letters: list[dict[bytes, bytes]] = []
        for _, words in await self.raw("XRANGE", self.keys.dead, "-", "+"):
            pairs: Sequence[tuple[bytes, bytes]] = list(zip(words[::2], words[1::2], strict=True))
            assert len(dict(pairs)) == len(pairs), f"a field stands twice in a dead letter: {words}"
            letters.append(dict(pairs))
        return letters

    async def events(self) -> list[str]:
        return [words[1].decode() for _, words in await self.raw("XRANGE", self.keys.events, "-", "+")]

    async def key_names(self) -> set[str]:
        """All keys of the run, without the part that they share."""
        found = await self.raw("KEYS", self.keys.prefix.replace("[", "\\[") + "*")
        return {name.decode().removeprefix(self.keys.prefix) for name in found}

    async def check_nothing_left(self) -> None:
        """Close what is open; afterwards nothing of a batch exists, and what else there is expires by itself."""
        for batch in self.batches:
            client = batch.client
            await client.close(batch.id, batch.queued()) if await client.own() == 0 else None
        left = await self.key_names()
        allowed = ("events", "dead", "owner:", "results:", "groups:", "instance:")
        assert not [name for name in left if not name.startswith(allowed)], left
        for name in left - {"events", "dead"}:
            assert await self.raw("PTTL", self.keys.prefix + name) > 0, f"{name} would stay for ever"
        if f"groups:{SHARD}" in left:
            assert await self.queued() == []
            assert await self.pending() == 0

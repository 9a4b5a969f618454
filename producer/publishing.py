"""Publishing a batch: groups are encoded one by one and written together, each shard at its own pace, then the batch is sealed.

A group is on its stream at most once, whatever is sent again. Publishing waits while a shard's queue, or the broker's memory, is
over its bound; an empty queue admits one group of any size. The wait says its name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ..broker import codec
from ..broker.channel import Payload
from ..broker.client_transitions import BatchSpec, ClientTransitions, OutgoingGroup, Published
from ..broker.errors import BatchError, BrokerFullError, PayloadTooLargeError
from ..broker.keys import Keys
from ..broker.settings import BrokerSettings
from ..broker.steps import Runner
from .rows import PromptGroup

log = logging.getLogger("rolloutbus.producer")

# One write holds about this much: enough that a round trip costs little per group, little enough that work begins at once.
WRITE_BYTES = 256 * 1024
WRITE_GROUPS = 64
_POLL_S = 0.02
_SAY_EVERY_S = 30.0
_MEMORY_CHECK_EVERY_S = 0.5


@dataclass(slots=True)
class Publication:
    """One batch on its way out: its groups, and where they stand on the broker once they are there."""

    batch: str
    groups: Sequence[PromptGroup]
    num_generations: int
    entries: dict[int, str] = field(default_factory=dict[int, str])
    published: int = 0
    sealed: bool = False
    waiting_for: str = ""

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.shard for group in self.groups))

    @property
    def layout(self) -> str:
        """Where each group goes, as JSON runs `[shard, route, how many]`, so that a client that comes back can go on."""
        runs = [[shard, route, len(list(same))] for (shard, route), same in itertools.groupby(self.groups, _destination)]
        return json.dumps(runs, separators=(",", ":"))

    @property
    def spec(self) -> BatchSpec:
        rows = sum(len(group.rows) for group in self.groups)
        return BatchSpec(self.batch, len(self.groups), rows, self.num_generations, self.shards, self.layout)


def _destination(group: PromptGroup) -> tuple[str, str]:
    return group.shard, group.route


def encode_group(batch: str, group: PromptGroup, max_bytes: int) -> OutgoingGroup:
    """A group ready for the wire; raises `EncodeError` or `PayloadTooLargeError` naming the row."""
    payload = Payload.of(codec.encode_rows(group.rows, first_row=group.first_row))
    if payload.size > max_bytes:
        raise PayloadTooLargeError(
            f"the group that begins at row {group.first_row} is {payload.size} bytes, above max_payload_bytes ({max_bytes}); "
            "send less per row, or raise rolloutbus.broker.max_payload_bytes"
        )
    return OutgoingGroup(batch, group.index, group.shard, group.route, len(group.rows), group.first_row, payload)


class Producer:
    """Publishes batches of one client."""

    def __init__(self, runner: Runner, keys: Keys, settings: BrokerSettings, transitions: ClientTransitions) -> None:
        self._runner = runner
        self._keys = keys
        self._settings = settings
        self._transitions = transitions
        self._memory_checked = 0.0

    async def publish(self, publication: Publication) -> None:
        """Open the batch, publish all its groups, seal it. May be called again after a lost broker: what is there stays."""
        await self._transitions.open(publication.spec)
        by_shard = {shard: [g for g in publication.groups if g.shard == shard] for shard in publication.shards}
        try:
            async with asyncio.TaskGroup() as tasks:
                for groups in by_shard.values():
                    tasks.create_task(self._publish_shard(publication, groups))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        await self._seal(publication)

    async def republish(self, publication: Publication, missing: Sequence[PromptGroup]) -> None:
        """After the broker lost data: open the batch again if it is gone, and publish what has not come back."""
        publication.sealed = False
        await self._transitions.open(dataclasses.replace(publication.spec, groups=len(missing)))
        await self._publish_shard(publication, missing)
        await self._seal(publication)

    async def _seal(self, publication: Publication) -> None:
        status = await self._transitions.seal(publication.batch)
        if status != "ok":
            raise BatchError(f"batch {publication.batch} could not be sealed: the broker does not hold all its groups")
        publication.sealed = True

    async def _publish_shard(self, publication: Publication, groups: Sequence[PromptGroup]) -> None:
        at = 0
        while at < len(groups):
            await self._memory_has_room(publication)
            writes: list[OutgoingGroup] = []
            size = 0
            while at < len(groups) and len(writes) < WRITE_GROUPS and size < WRITE_BYTES:
                writes.append(encode_group(publication.batch, groups[at], self._settings.max_payload_bytes))
                size += writes[-1].payload.size
                at += 1
            queued = await self._write(publication, writes)
            if queued > self._settings.max_queued_bytes:
                await self._queue_has_room(publication, writes[-1].shard)

    async def _write(self, publication: Publication, writes: list[OutgoingGroup]) -> int:
        """Publish `writes` until all are on their stream; returns the bytes then queued for their shard."""
        queued = 0
        while writes:
            left: list[OutgoingGroup] = []
            for group, answer in zip(writes, await self._transitions.publish(writes), strict=True):
                if isinstance(answer, BrokerFullError):
                    left.append(group)
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    queued = max(queued, self._note(publication, group, answer, left))
            if left:
                await self._wait(publication, f"the broker is at maxmemory; {len(left)} groups wait", lambda: self._room(0.98))
                await self._transitions.open(publication.spec)
            writes = left
        return queued

    def _note(self, publication: Publication, group: OutgoingGroup, answer: Published, left: list[OutgoingGroup]) -> int:
        if answer.status == "no-stream":
            left.append(group)
            return 0
        publication.published += 1
        if answer.entry:
            publication.entries[group.group] = answer.entry
        return answer.queued_bytes

    async def _memory_has_room(self, publication: Publication) -> None:
        now = time.monotonic()
        if now - self._memory_checked < _MEMORY_CHECK_EVERY_S:
            return
        self._memory_checked = now
        ratio = self._settings.memory_high_ratio
        if not await self._room(ratio):
            await self._wait(publication, f"the broker's memory is over {ratio:.0%} of maxmemory", lambda: self._room(ratio))

    async def _room(self, ratio: float) -> bool:
        info = (await self._runner.run([("INFO", "memory")]))[0]
        facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
        limit = int(facts.get("maxmemory", 0))
        return limit == 0 or int(facts.get("used_memory", 0)) < ratio * limit

    async def _queue_has_room(self, publication: Publication, shard: str) -> None:
        key, field_name = self._keys.batch(publication.batch), f"queued_bytes:{shard}"

        async def room() -> bool:
            raw = (await self._runner.run([("HGET", key, field_name)]))[0]
            return int(raw or 0) <= self._settings.max_queued_bytes

        await self._wait(publication, f"shard {shard} has {self._settings.max_queued_bytes} bytes queued for this batch", room)

    async def _wait(self, publication: Publication, what: str, room: Callable[[], Awaitable[bool]]) -> None:
        started = said = time.monotonic()
        publication.waiting_for = what
        try:
            while not await room():
                await asyncio.sleep(_POLL_S)
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    log.warning("batch %s: publishing waits since %.0f s: %s", publication.batch, said - started, what)
        finally:
            publication.waiting_for = ""

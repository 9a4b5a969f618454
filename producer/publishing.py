"""Publishing a batch: groups are encoded one by one and written together, each shard at its own pace, then the batch is
sealed.

A group is on its stream at most once, whatever is sent again. Publishing waits while a shard's queue, or the broker's
memory, is over its bound; an empty queue admits one group of any size. The wait says its name.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..broker import codec
from ..broker.channel import Payload
from ..broker.client_transitions import BatchSpec, ClientTransitions, OutgoingGroup, Published
from ..broker.errors import BatchError, BrokerFullError, PayloadTooLargeError
from ..broker.keys import Keys
from ..broker.messages import ReplayOrigin
from ..broker.settings import BrokerSettings
from ..broker.steps import Runner
from .rows import PromptGroup

log = logging.getLogger("rolloutbus.producer")

# One write holds about this much: enough that a round trip costs little per group, and that many replicas find several
# groups each.
WRITE_BYTES = 1 << 20
WRITE_GROUPS = 256
FIRST_WRITE_GROUPS = 2
# After this many groups were encoded, whoever else wants the event loop has it: the first results are there before the
# last groups are out.
ENCODED_AT_ONCE = 4
# While the first writes grow, whoever unpacks the first results has this long to get at the interpreter's lock, which a
# thread that is busy encoding takes back at once; workers have enough to do meanwhile.
BREATH_S = 0.001
# They count, and nothing but an operator ends them.
_DEAD_LETTERS_TOO = " (dead letters fill it too: `rolloutbus dead list`, `dead drop`)"
# A write that was refused for want of memory is tried again below this share of maxmemory.
FULL_RATIO = 0.98
# Groups of which a broker that lost its data is told in one step.
RESTORED_AT_ONCE = 1000
CHECKSUM_LENGTH = 8
_POLL_S = 0.02
_SAY_EVERY_S = 30.0
_MEMORY_CHECK_EVERY_S = 0.5


@dataclass(slots=True)
class Publication:
    """One batch on its way out: its groups, and where they stand on the broker once they are there.

    `origin` is what its group was before, where it is one that is replayed.
    """

    batch: str
    groups: Sequence[PromptGroup]
    num_generations: int
    origin: ReplayOrigin | None = None
    entries: dict[int, str] = field(default_factory=dict[int, str])
    placed: set[int] = field(default_factory=set[int])
    checksums: dict[int, str] = field(default_factory=dict[int, str])
    opened: bool = False
    waiting_for: str = ""

    @property
    def published(self) -> int:
        """How many groups have been on the broker, each counted once."""
        return len(self.placed)

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.shard for group in self.groups))

    @property
    def layout(self) -> str:
        """Where each group goes, as JSON runs `[shard, route, how many]`, for a client that comes back and goes on."""
        runs = [
            [shard, route, len(list(same))] for (shard, route), same in itertools.groupby(self.groups, _destination)
        ]
        return json.dumps(runs, separators=(",", ":"))

    @property
    def all_checksums(self) -> str:
        """Those of all groups, one after another, for a client that comes back; empty where one is unknown."""
        if len(self.checksums) < len(self.groups):
            return ""
        return "".join(self.checksums[group.index] for group in self.groups)

    @property
    def spec(self) -> BatchSpec:
        rows = sum(len(group.rows) for group in self.groups)
        return BatchSpec(self.batch, len(self.groups), rows, self.num_generations, self.shards, self.layout)


def _destination(group: PromptGroup) -> tuple[str, str]:
    return group.shard, group.route


def encode_group(batch: str, group: PromptGroup, origin: ReplayOrigin | None = None) -> OutgoingGroup:
    """A group ready for the wire; raises `EncodeError` naming the row."""
    # The caller may have stamped the same rows for another batch meanwhile.
    rows = [{**row, "_rowidx": index} for index, row in enumerate(group.rows, start=group.first_row)]
    payload = Payload.of(codec.encode_rows(rows, first_row=group.first_row))
    return OutgoingGroup(
        batch, group.index, group.shard, group.route, len(group.rows), group.first_row, payload, origin
    )


def checksum(group: OutgoingGroup) -> str:
    """CRC-32 of the payload, `CHECKSUM_LENGTH` hexadecimal digits: the same rows are packed to the same bytes."""
    crc = 0
    for buffer in group.payload.buffers:
        crc = zlib.crc32(buffer, crc)
    return f"{crc:0{CHECKSUM_LENGTH}x}"


class Producer:
    """Publishes batches of one client."""

    def __init__(self, runner: Runner, keys: Keys, settings: BrokerSettings, transitions: ClientTransitions) -> None:
        self._runner = runner
        self._keys = keys
        self._settings = settings
        self._transitions = transitions
        self._memory_checked = 0.0

    async def publish(self, publication: Publication) -> None:
        """Open the batch, publish all its groups, seal it. May be called again: what is there stays."""
        await self._open(publication)
        await self._publish_groups(publication, publication.groups)
        await self._seal(publication)

    async def republish(
        self, publication: Publication, missing: Sequence[PromptGroup], ended: Mapping[int, str]
    ) -> None:
        """After the broker lost data: open the batch again if it is gone, publish what has not come back, and say what
        has `ended`, as `ClientTransitions.restore` takes it.
        """
        await self._open(publication)
        told = iter(ended.items())
        while some := dict(itertools.islice(told, RESTORED_AT_ONCE)):
            await self._transitions.restore(publication.batch, publication.num_generations, some)
        await self._publish_groups(publication, missing)
        await self._seal(publication)

    async def _open(self, publication: Publication) -> str:
        while True:
            await self._memory_has_room(publication)
            try:
                status = await self._transitions.open(publication.spec)
            except BrokerFullError as error:
                await self._wait(publication, str(error), lambda: self._room(FULL_RATIO))
                continue
            publication.opened = True
            return status

    async def _publish_groups(self, publication: Publication, groups: Sequence[PromptGroup]) -> None:
        by_shard: dict[str, list[PromptGroup]] = {}
        for group in groups:
            by_shard.setdefault(group.shard, []).append(group)
        try:
            async with asyncio.TaskGroup() as tasks:
                for members in by_shard.values():
                    tasks.create_task(self._publish_shard(publication, members))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _seal(self, publication: Publication) -> None:
        status = await self._transitions.seal(publication.batch, publication.all_checksums)
        if status != "ok":
            raise BatchError(f"batch {publication.batch} could not be sealed: the broker does not hold all its groups")

    async def _publish_shard(self, publication: Publication, groups: Sequence[PromptGroup]) -> None:
        at, most = 0, FIRST_WRITE_GROUPS
        while at < len(groups):
            await self._memory_has_room(publication)
            writes: list[OutgoingGroup] = []
            size = 0
            while at < len(groups) and len(writes) < most and size < min(WRITE_BYTES, self._settings.max_queued_bytes):
                writes.append(self._encode(publication, groups[at]))
                size += writes[-1].payload.size
                at += 1
                if not at % ENCODED_AT_ONCE:
                    await asyncio.sleep(0)
            queued = await self._write(publication, writes)
            if queued > self._settings.max_queued_bytes:
                await self._queue_has_room(publication, writes[-1].shard)
            elif most < WRITE_GROUPS and at < len(groups):
                await asyncio.sleep(BREATH_S)
            most = min(2 * most, WRITE_GROUPS)

    def _encode(self, publication: Publication, group: PromptGroup) -> OutgoingGroup:
        outgoing = encode_group(publication.batch, group, publication.origin)
        limit = self._settings.max_payload_bytes
        if outgoing.payload.size > limit:
            raise PayloadTooLargeError(
                f"the group that begins at row {group.first_row} is {outgoing.payload.size} bytes, above "
                f"max_payload_bytes ({limit}); send less per row, or raise rolloutbus.broker.max_payload_bytes"
            )
        publication.checksums[group.index] = checksum(outgoing)
        return outgoing

    async def _write(self, publication: Publication, writes: list[OutgoingGroup]) -> int:
        """Publish `writes` until all are on their stream; returns the bytes then queued for their shard."""
        queued = 0
        while writes:
            answers = await self._transitions.publish(writes)
            full: list[OutgoingGroup] = []
            homeless: list[OutgoingGroup] = []
            for group, answer in zip(writes, answers, strict=True):
                if isinstance(answer, BrokerFullError):
                    full.append(group)
                elif isinstance(answer, Exception):
                    raise answer
                elif answer.status == "no-stream":
                    homeless.append(group)
                else:
                    queued = max(queued, self._note(publication, group, answer))
            if homeless and await self._open(publication) == "ok":
                raise BatchError(f"batch {publication.batch} vanished from the broker while it was being published")
            if full:
                what = f"the broker is at maxmemory{_DEAD_LETTERS_TOO}; {len(full)} groups wait"
                await self._wait(publication, what, lambda: self._room(FULL_RATIO))
            writes = [*homeless, *full]
        return queued

    def _note(self, publication: Publication, group: OutgoingGroup, answer: Published) -> int:
        publication.placed.add(group.group)
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
            what = f"the broker's memory is over {ratio:.0%} of maxmemory{_DEAD_LETTERS_TOO}"
            await self._wait(publication, what, lambda: self._room(ratio))

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

        await self._wait(
            publication, f"shard {shard} has {self._settings.max_queued_bytes} bytes queued for this batch", room
        )

    async def _wait(self, publication: Publication, what: str, room: Callable[[], Awaitable[bool]]) -> None:
        started = said = time.monotonic()
        publication.waiting_for = what
        try:
            # Once in any case: a broker that refuses for another reason than its memory says that it has room.
            await asyncio.sleep(_POLL_S)
            while not await room():
                await asyncio.sleep(_POLL_S)
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    log.warning("batch %s: publishing waits since %.0f s: %s", publication.batch, said - started, what)
        finally:
            publication.waiting_for = ""

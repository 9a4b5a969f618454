"""One reader per client: it reads all its result streams with one XREAD, merges in completion order, and feeds the
batches.

Entries are read, not taken: they stay on the broker until their group has been handed over. After a broker's restart
everything is read again from the start; what was seen is dropped by the batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..broker.channel import Channel, Command, Link, ReplyError
from ..broker.client_transitions import ClientTransitions
from ..broker.errors import BrokerTimeoutError, BrokerUnavailableError, OwnershipLostError, RolloutBusError
from ..broker.handshake import translate
from ..broker.keys import Keys
from ..broker.messages import ForeignEntryError, ResultEntry, parse_result
from ..broker.outage import Outage
from ..broker.settings import BrokerSettings
from .collection import BatchCollection, Handover

log = logging.getLogger("rolloutbus.collector")

# About this much per read of all streams: with half of it 64 KB rows are a twentieth slower, and twice as much gives
# nothing (measured).
READ_BYTES = 1 << 23
MAX_COUNT = 512
# After so many bytes were taken in, the trainer's own thread has a chance to unpack what is there.
TAKEN_IN_AT_ONCE = 1 << 20
# From here on an entry is worth being received into memory of its own.
LARGE_ENTRIES = 32 * 1024
MAX_ENTRIES_HANDED = 1000


class Collector:
    """Reads for the client of `transitions`. `on_restart` is called when the broker that answers is another process
    than before.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        keys: Keys,
        link: Link,
        transitions: ClientTransitions,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._link = link
        self._transitions = transitions
        self._on_restart = on_restart
        self._batches: dict[str, BatchCollection] = {}
        # Entries (shard, id) of batches that are not collected here, by batch.
        self._strangers: dict[str, list[tuple[str, str]]] = {}
        self._strangers_due = 0.0
        self._cursors: dict[str, str] = {}
        self._taken_in: dict[str, float] = {}
        self._channel: Channel | None = None
        self._run_id = ""
        self._reading = False
        self._reads = 0
        self._work = asyncio.Event()
        self._handovers: deque[Handover] = deque()
        self._handover_due = asyncio.Event()
        self._handover_done = asyncio.Event()
        # A guess until the first ones have come: better too few at first than megabytes over a slow network.
        self._entry_bytes = 512.0 * 1024

    @property
    def shards(self) -> list[str]:
        """Shards whose result streams are read."""
        return list(self._cursors)

    def taken_in(self, shard: str) -> float:
        """Monotonic seconds: all that stood on the shard's results stream then has been given to its batches."""
        return self._taken_in.get(shard, float("-inf"))

    @property
    def batches(self) -> list[BatchCollection]:
        return list(self._batches.values())

    async def attach(self, batch: BatchCollection, shards: Sequence[str], *, from_start: bool = False) -> None:
        """Begin to collect `batch` from the streams of `shards`; `from_start` also what came before."""
        self._batches[batch.batch] = batch
        known = len(self._cursors)
        for shard in shards:
            self._cursors.setdefault(shard, "0-0")
        if from_start:
            self._rewind()
        self._work.set()
        if len(self._cursors) != known or from_start:
            await self._interrupt()

    def detach(self, batch: str) -> None:
        """The batch is over on the broker too; what is left of it there, and what is still to be read, is deleted."""
        over = self._batches.pop(batch, None)
        if over is not None:
            self._let_go(over.leftovers())

    def hand_over(self, batch: str, groups: Sequence[int]) -> None:
        """The trainer has these groups; their entries are deleted soon."""
        collection = self._batches.get(batch)
        if collection is not None and groups:
            self._let_go(collection.hand_over(groups))

    async def handed_over(self) -> None:
        """Return when every hand-over so far is on the broker."""
        while self._handovers or not self._handover_done.is_set():
            await self._handover_done.wait()
            await asyncio.sleep(0)

    def _let_go(self, handovers: Sequence[Handover]) -> None:
        if handovers:
            self._handovers.extend(handovers)
            self._handover_done.clear()
            self._handover_due.set()

    async def run(self) -> None:
        """Read until cancelled."""
        self._handover_done.set()
        flusher = asyncio.create_task(self._hand_over_for_ever(), name="hand-over")
        try:
            await self._read_for_ever()
        finally:
            flusher.cancel()
            await asyncio.gather(flusher, return_exceptions=True)
            if self._channel is not None:
                await self._channel.close()

    async def _read_for_ever(self) -> None:
        outage = Outage(log, "collector")
        while True:
            await self._work.wait()
            began = time.monotonic()
            try:
                entries, emptied = await self._read()
                outage.over()
            except (BrokerUnavailableError, BrokerTimeoutError) as error:
                # Perhaps it is more than this server sends at once.
                self._entry_bytes = min(2 * self._entry_bytes, READ_BYTES)
                await outage.pause(error)
                continue
            met = await self._dispatch(entries)
            if self._strangers and (met or began >= self._strangers_due):
                await self._drop_left_over()
            self._taken_in.update(dict.fromkeys(emptied, began))

    async def _read(self) -> tuple[list[tuple[str, Any]], list[str]]:
        """The next entries of all streams, (shard, raw entry), oldest first; and the shards that had no more."""
        channel = await self._connected()
        began = dict(self._cursors)
        count = max(1, min(MAX_COUNT, int(READ_BYTES / self._entry_bytes / max(1, len(began)))))
        self._reads += 1
        self._reading = True
        try:
            command = self._read_command(began, count)
            reply = (await channel.send([command], large=self._entry_bytes >= LARGE_ENTRIES))[0]
        finally:
            self._reading = False
        if isinstance(reply, ReplyError):
            if str(reply).startswith("UNBLOCKED"):
                return [], []
            raise translate(reply, "the broker")
        entries = self._ordered(reply or [], began)
        found = Counter(shard for shard, _ in entries)
        return entries, [shard for shard in began if found[shard] < count]

    def _read_command(self, cursors: Mapping[str, str], count: int) -> Command:
        names = [self._keys.results(self._transitions.client, shard) for shard in cursors]
        block_ms = int(self._settings.block_s * 1000)
        return ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", *names, *cursors.values())

    def _ordered(self, reply: Sequence[Any], began: Mapping[str, str]) -> list[tuple[str, Any]]:
        entries: list[tuple[str, Any]] = []
        prefix = len(self._keys.results(self._transitions.client, ""))
        for name, found in reply:
            shard = name.decode()[prefix:]
            entries.extend((shard, raw) for raw in found)
            # A transaction that deleted what it had added wakes the read with no entry at all. A stream that is to be
            # read from its start again since this read went out does not go on from here.
            if found and self._cursors.get(shard) == began[shard]:
                self._cursors[shard] = found[-1][0].decode()
        if len(reply) > 1:
            entries.sort(key=lambda item: _order(item[1][0]))
        return entries

    async def _connected(self) -> Channel:
        if self._channel is not None and not self._channel.broken:
            return self._channel
        if self._channel is not None:
            await self._channel.close()
        self._channel = await Channel.open(
            self._settings, f"collector:{self._transitions.client}", self._settings.block_s + 2.0
        )
        run_id = self._channel.hello.run_id
        if self._run_id and run_id != self._run_id:
            log.warning("the broker was restarted; reading all results again and looking for what is missing")
            self._rewind()
            for batch in self.batches:
                batch.start_over()
            self._on_restart()
        self._run_id = run_id
        return self._channel

    def _rewind(self) -> None:
        self._cursors = dict.fromkeys(self._cursors, "0-0")
        self._strangers.clear()

    async def _dispatch(self, entries: Sequence[tuple[str, Any]]) -> bool:
        """Give each entry to its batch; whether there were some of batches that are not collected here."""
        size, given_way, met = 0, 0, False
        for shard, (entry_id, fields) in entries:
            try:
                entry = parse_result(entry_id, fields)
                size += len(entry.payload)
                met |= self._feed(shard, entry)
                if size - given_way >= TAKEN_IN_AT_ONCE:
                    given_way = size
                    await asyncio.sleep(0)
            except ForeignEntryError as error:
                await self._set_aside(shard, entry_id.decode(), str(error))
        if entries:
            self._entry_bytes = 0.5 * self._entry_bytes + 0.5 * max(256.0, size / len(entries))
        return met

    async def _set_aside(self, shard: str, entry: str, reason: str) -> None:
        log.error("set aside to the dead letters: %s", reason)
        try:
            await self._transitions.set_aside(shard, entry, reason)
        except RolloutBusError as error:
            log.warning("entry %s stays on the results stream of shard %s (%s)", entry, shard, error)

    def _feed(self, shard: str, entry: ResultEntry) -> bool:
        batch = self._batches.get(entry.batch)
        if batch is None:
            self._strangers.setdefault(entry.batch, []).append((shard, entry.entry))
            return True
        self._let_go(batch.add(entry))
        if entry.kind == "cancelled":
            self._let_go([_nobodys(shard, entry.entry)])
        return False

    async def _drop_left_over(self) -> None:
        """Delete results of batches that are over; one that still exists may yet be resumed, and is looked at again."""
        batches = list(self._strangers)
        self._strangers_due = time.monotonic() + self._settings.sweep_every_s
        try:
            there = await self._link.run([("EXISTS", self._keys.batch(batch)) for batch in batches])
        except RolloutBusError as error:
            log.warning("cannot look up %d unknown batches (%s)", len(batches), error)
            return
        for batch, exists in zip(batches, there, strict=True):
            # While this was asked, all may have been read again from the start.
            if not exists and batch in self._strangers:
                self._let_go([_nobodys(shard, entry) for shard, entry in self._strangers.pop(batch)])

    async def _hand_over_for_ever(self) -> None:
        while True:
            await self._handover_due.wait()
            self._handover_due.clear()
            while self._handovers:
                due = _joined(self._handovers)
                for handover in due:
                    await self._hand_over_one(handover)
            self._handover_done.set()

    async def _hand_over_one(self, handover: Handover) -> None:
        if not handover.entries:
            return
        status = ""
        try:
            for part in _parts(handover):
                status = await self._transitions.handed(*part)
        except RolloutBusError as error:
            log.warning(
                "could not acknowledge %d entries of batch %s (%s)", len(handover.entries), handover.batch, error
            )
            return
        batch = self._batches.get(handover.batch)
        if status == "not-owner" and batch is not None:
            batch.error(
                OwnershipLostError(f"another process holds client {self._transitions.client!r} now; this one ends")
            )

    async def _interrupt(self) -> None:
        """End a blocked read so that the next one sees the new streams and cursors; repeated, because it races with its
        begin.
        """
        read = self._reads
        while self._reading and self._reads == read and self._channel is not None and not self._channel.broken:
            await self._link.run([("CLIENT", "UNBLOCK", self._channel.hello.client_id)])
            await asyncio.sleep(0.005)


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _nobodys(shard: str, entry: str) -> Handover:
    """An entry that counts towards no batch."""
    return Handover("-", shard, [], {entry: 0})


def _parts(handover: Handover) -> Iterator[Handover]:
    """As many entries at a time as one call of a script may name; the groups go with the last of them."""
    entries = list(handover.entries.items())
    while len(entries) > MAX_ENTRIES_HANDED:
        yield handover._replace(groups=[], entries=dict(entries[:MAX_ENTRIES_HANDED]))
        del entries[:MAX_ENTRIES_HANDED]
    yield handover._replace(entries=dict(entries))


def _joined(handovers: deque[Handover]) -> list[Handover]:
    """Waiting hand-overs, those of the same batch and shard as one. An entry that was read twice counts once."""
    joined: dict[tuple[str, str], tuple[list[int], dict[str, int]]] = {}
    taken = 0
    while handovers and taken < MAX_ENTRIES_HANDED:
        taken += len(handovers[0].entries)
        batch, shard, more_groups, more_entries = handovers.popleft()
        groups, entries = joined.setdefault((batch, shard), ([], {}))
        groups.extend(more_groups)
        entries.update(more_entries)
    return [Handover(batch, shard, groups, entries) for (batch, shard), (groups, entries) in joined.items()]

"""Bringing finished rows into the broker: one flusher per worker sends whatever finished since the last reply in one
write.

Rows of one attempt share an entry up to 1 MB; entries of a quarter of it and of several MB are slower (measured). A
group's last rows, its acknowledgement and its deletion are one step. What the broker accepted before is dropped and the
rest sent again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..broker.channel import Payload
from ..broker.errors import RolloutBusError
from ..broker.messages import frame
from ..broker.worker_transitions import Acceptance, Accepted, Attempt, Rows, WorkerTransitions
from .timing import InstanceTiming

ENTRY_BYTES = 1 << 20
# A step is one transaction: the server runs it whole, so a group of large rows goes in several.
STEP_BYTES = 1 << 20
# One write holds about this much, so that a hundred large groups that end together do not fill the connection for
# seconds.
WRITE_BYTES = 4 << 20
# While more than this waits to be written, environments are not asked for their next row: memory stays bounded, and is
# used again while it is warm.
WAITING_BYTES = 8 << 20


class LostAttemptError(RolloutBusError, RuntimeError):
    """The broker refused a write: the attempt lost its lease or its batch is closed."""


class IncompleteGroupError(RolloutBusError, ConnectionError):
    """A finish did not cover every row of its group: the broker lost what it had accepted, another attempt may do."""


@dataclass(eq=False, slots=True)
class Outgoing:
    """Rows of one attempt on their way. `settled` ends when the group is finished, or tells why it cannot be."""

    attempt: Attempt
    settled: asyncio.Future[None]
    whole: bool
    rows: dict[int, Payload] = field(default_factory=dict[int, Payload])
    size: int = 0
    complete: bool = False
    # Rows that have not been added yet; the instance's times travel with the last one.
    missing: int = 0
    age: int = 0
    # Of all rows that were added.
    added_bytes: int = 0
    # Steps that were sent and not answered, and what ends when there is none and no row waits.
    unanswered: int = 0
    written: asyncio.Future[None] | None = None

    @property
    def ready(self) -> bool:
        return self.complete or (bool(self.rows) and not self.whole)

    def put_back(self, rows: Mapping[int, Payload]) -> None:
        """Rows that are to be sent again."""
        self.rows.update(rows)
        self.size += sum(payload.size for payload in rows.values())

    def take(self, most: int | None) -> dict[int, Payload]:
        """The rows that go out next: all of them, or the first ones of about `most` bytes, at least one."""
        if most is None or self.size <= most:
            rows, self.rows, self.size = self.rows, {}, 0
            return rows
        rows: dict[int, Payload] = {}
        taken = 0
        for at, payload in self.rows.items():
            if rows and taken + payload.size > most:
                break
            rows[at] = payload
            taken += payload.size
        for at in rows:
            del self.rows[at]
        self.size -= taken
        return rows

    def give_up(self, error: Exception) -> None:
        if not self.settled.done():
            self.settled.set_exception(error)

    def answered(self) -> None:
        """A step of this attempt has its answer."""
        self.unanswered -= 1
        if self.written is not None and not self.written.done() and not self.under_way:
            self.written.set_result(None)

    @property
    def under_way(self) -> bool:
        """Whether a step is unanswered or a row waits to be sent, of an attempt that can still write."""
        return not self.settled.done() and bool(self.unanswered or (self.rows and not self.whole))


class _Write(NamedTuple):
    """What one attempt has in a write, kept until the answer: after a duplicate the rest is sent again."""

    outgoing: Outgoing
    rows: dict[int, Payload]
    acceptance: Acceptance


class Finisher:
    """Accepts rows one by one, writes them together."""

    def __init__(self, transitions: WorkerTransitions, timing: InstanceTiming) -> None:
        self._transitions = transitions
        self._timing = timing
        self._waiting: dict[Outgoing, None] = {}
        self._waiting_bytes = 0
        # By age of their attempts: the oldest group goes on first, so that groups end one after another, not all at
        # the end.
        self._without_room: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        # Of the results of a finished group, the latest ones counting most.
        self.group_bytes = 0.0

    def begin(self, attempt: Attempt, *, whole: bool, missing: int) -> Outgoing:
        """Announce an attempt; `whole` holds its `missing` rows back until the group is complete."""
        settled = asyncio.get_running_loop().create_future()
        return Outgoing(attempt, settled, whole, missing=missing, age=next(self._numbers))

    def add(self, outgoing: Outgoing, position: int, payload: Payload) -> asyncio.Future[None] | None:
        """A row is finished; gives what to wait for before the next one, where too much is on its way already."""
        outgoing.rows[position] = payload
        outgoing.size += payload.size
        outgoing.added_bytes += payload.size
        outgoing.missing -= 1
        if outgoing.whole:
            return None
        self._waiting_bytes += payload.size
        self._enqueue(outgoing)
        if self._waiting_bytes < WAITING_BYTES or not outgoing.missing:
            return None
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._without_room, (outgoing.age, next(self._numbers), room))
        return room

    def complete(self, outgoing: Outgoing) -> None:
        """All rows have been added: finish the group with the next write."""
        outgoing.complete = True
        self._enqueue(outgoing)

    async def written(self, outgoing: Outgoing) -> None:
        """Return when all rows added so far are on the broker, or none will come there any more; rows that are held
        back are not waited for.
        """
        if outgoing.under_way:
            outgoing.written = asyncio.get_running_loop().create_future()
            await outgoing.written

    def drop(self, outgoing: Outgoing) -> None:
        """The attempt ended another way; what was not written yet is not written any more."""
        self._waiting.pop(outgoing, None)
        self._take(outgoing, None)
        if not outgoing.settled.cancel() and not outgoing.settled.cancelled():
            outgoing.settled.exception()  # nobody else asks any more, and asyncio would complain

    def _take(self, outgoing: Outgoing, most: int | None) -> dict[int, Payload]:
        """Rows that wait no longer; whoever waited for room may go on."""
        before = outgoing.size
        rows = outgoing.take(most)
        if not outgoing.whole:
            self._waiting_bytes -= before - outgoing.size
            self._give_room()
        return rows

    def _give_room(self) -> None:
        """Let those who wait for room go on, oldest first, one a tick: the row that one of them has ready counts for
        the next, and one that has none ready holds nobody up.
        """
        if self._without_room and self._waiting_bytes < WAITING_BYTES:
            waiter = heapq.heappop(self._without_room)[-1]
            if not waiter.done():
                waiter.set_result(None)
            asyncio.get_running_loop().call_soon(self._give_room)

    def _enqueue(self, outgoing: Outgoing) -> None:
        self._waiting[outgoing] = None
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._next_write():
                await self._write(batch)

    def _next_write(self) -> list[_Write]:
        writes: list[_Write] = []
        times: dict[str, str] = {}
        size = 0
        while self._waiting and size <= WRITE_BYTES:
            outgoing = next(iter(self._waiting))
            del self._waiting[outgoing]
            before = outgoing.size
            writes.append(self._next_of(outgoing, times))
            size += before - outgoing.size
        return writes

    def _next_of(self, outgoing: Outgoing, times: dict[str, str]) -> _Write:
        """What goes in one step; of large rows only the first, so that they flow while the rest is being written.

        A group's last entry carries the instance's `times` of its batch, which are looked up once for a whole write.
        """
        rows = self._take(outgoing, None if outgoing.whole else STEP_BYTES)
        if outgoing.rows:
            self._enqueue(outgoing)
        entries = [Rows(tuple(chunk), frame(list(chunk.values()))) for chunk in _chunks(rows)]
        if entries and not outgoing.rows and outgoing.missing <= 0:
            batch = outgoing.attempt.group.batch
            if batch not in times:
                times[batch] = self._timing.packed(batch)
            entries[-1] = entries[-1]._replace(timing=times[batch])
        finish = outgoing.complete and not outgoing.rows
        outgoing.unanswered += 1
        return _Write(outgoing, rows, Acceptance(outgoing.attempt, entries, finish))

    async def _write(self, writes: list[_Write]) -> None:
        try:
            answers = await self._transitions.accept([write.acceptance for write in writes])
        except RolloutBusError as error:
            answers = [error] * len(writes)
        for write, answer in zip(writes, answers, strict=True):
            if isinstance(answer, RolloutBusError):
                write.outgoing.give_up(answer)
            else:
                self._settle(write, answer)
            write.outgoing.answered()

    def _settle(self, write: _Write, answer: Accepted) -> None:
        outgoing = write.outgoing
        if outgoing.settled.done():
            return
        if answer.status in ("ok", "repeated"):
            if write.acceptance.finish:
                outgoing.settled.set_result(None)
                self.group_bytes += 0.2 * (outgoing.added_bytes - self.group_bytes)
        elif answer.status == "duplicate":
            before = outgoing.size
            outgoing.put_back({at: payload for at, payload in write.rows.items() if at not in answer.seen})
            self._waiting_bytes += 0 if outgoing.whole else outgoing.size - before
            if outgoing.ready:
                self._enqueue(outgoing)
        elif answer.status == "incomplete":
            group = outgoing.attempt.group
            outgoing.give_up(
                IncompleteGroupError(f"{answer.detail} of {group.rows} rows were accepted when the group was finished")
            )
        else:
            outgoing.give_up(LostAttemptError(answer.status))


def _chunks(rows: dict[int, Payload]) -> list[dict[int, Payload]]:
    """Rows as entries of up to ENTRY_BYTES."""
    chunks: list[dict[int, Payload]] = []
    size = ENTRY_BYTES
    for at, payload in rows.items():
        if size + payload.size > ENTRY_BYTES:
            chunks.append({})
            size = 0
        chunks[-1][at] = payload
        size += payload.size
    return chunks

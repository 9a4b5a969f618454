"""Bringing finished rows into the broker: one flusher per worker sends whatever finished since the last reply in one
write.

Rows of one attempt share an entry up to 256 KB (larger entries are slower at both ends, measured). A group's last rows,
its acknowledgement and its deletion are one step. What the broker accepted before is dropped and the rest sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..broker.channel import Payload
from ..broker.errors import RolloutBusError
from ..broker.messages import frame
from ..broker.worker_transitions import Acceptance, Accepted, Attempt, Rows, WorkerTransitions

ENTRY_BYTES = 256 * 1024
# A step is one transaction: the server runs it whole, so a group of large rows goes in several.
STEP_BYTES = 1 << 20
# One write holds about this much, so that a hundred large groups that end together do not fill the connection for
# seconds.
WRITE_BYTES = 4 << 20


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
    complete: bool = False
    timing: Callable[[], str] = str
    # Rows that have not been added yet; the instance's times travel with the last one.
    missing: int = 0

    @property
    def ready(self) -> bool:
        return self.complete or (bool(self.rows) and not self.whole)

    def give_up(self, error: Exception) -> None:
        if not self.settled.done():
            self.settled.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Write:
    """What one attempt has in a write, kept until the answer: after a duplicate the rest is sent again."""

    outgoing: Outgoing
    rows: dict[int, Payload]
    acceptance: Acceptance


class Finisher:
    """Accepts rows one by one, writes them together."""

    def __init__(self, transitions: WorkerTransitions) -> None:
        self._transitions = transitions
        self._waiting: dict[Outgoing, None] = {}
        self._wake = asyncio.Event()

    def begin(self, attempt: Attempt, *, whole: bool, timing: Callable[[], str], missing: int) -> Outgoing:
        """Announce an attempt; `whole` holds its `missing` rows back until the group is complete."""
        settled = asyncio.get_running_loop().create_future()
        return Outgoing(attempt, settled, whole, timing=timing, missing=missing)

    def add(self, outgoing: Outgoing, position: int, payload: Payload) -> None:
        """A row is finished."""
        outgoing.rows[position] = payload
        outgoing.missing -= 1
        if not outgoing.whole:
            self._enqueue(outgoing)

    def complete(self, outgoing: Outgoing) -> None:
        """All rows have been added: finish the group with the next write."""
        outgoing.complete = True
        self._enqueue(outgoing)

    def drop(self, outgoing: Outgoing) -> None:
        """The attempt ended another way; what was not written yet is not written any more."""
        self._waiting.pop(outgoing, None)
        outgoing.rows.clear()
        if not outgoing.settled.cancel() and not outgoing.settled.cancelled():
            outgoing.settled.exception()  # nobody else asks any more, and asyncio would complain

    def _enqueue(self, outgoing: Outgoing) -> None:
        self._waiting[outgoing] = None
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # rows that finish within one tick travel together
            self._wake.clear()
            while batch := self._next_write():
                await self._write(batch)

    def _next_write(self) -> list[_Write]:
        writes: list[_Write] = []
        size = 0
        while self._waiting and size <= WRITE_BYTES:
            outgoing = next(iter(self._waiting))
            del self._waiting[outgoing]
            writes.append(self._next_of(outgoing))
            size += sum(payload.size for payload in writes[-1].rows.values())
        return writes

    def _next_of(self, outgoing: Outgoing) -> _Write:
        """What goes in one step; of large rows only the first, so that they flow while the rest is being written."""
        rows = outgoing.rows if outgoing.whole else _first_step(outgoing.rows)
        outgoing.rows = {at: payload for at, payload in outgoing.rows.items() if at not in rows}
        if outgoing.rows:
            self._enqueue(outgoing)
        timing = str if outgoing.rows or outgoing.missing > 0 else outgoing.timing
        finish = outgoing.complete and not outgoing.rows
        return _Write(outgoing, rows, Acceptance(outgoing.attempt, _share(rows, timing), finish))

    async def _write(self, writes: list[_Write]) -> None:
        try:
            answers = await self._transitions.accept([write.acceptance for write in writes])
        except RolloutBusError as error:
            for write in writes:
                write.outgoing.give_up(error)
            return
        for write, answer in zip(writes, answers, strict=True):
            if isinstance(answer, RolloutBusError):
                write.outgoing.give_up(answer)
            else:
                self._settle(write, answer)

    def _settle(self, write: _Write, answer: Accepted) -> None:
        outgoing = write.outgoing
        if outgoing.settled.done():
            return
        if answer.status in ("ok", "repeated"):
            if write.acceptance.finish:
                outgoing.settled.set_result(None)
        elif answer.status == "duplicate":
            outgoing.rows.update({at: payload for at, payload in write.rows.items() if at not in answer.seen})
            if outgoing.ready:
                self._enqueue(outgoing)
        elif answer.status == "incomplete":
            group = outgoing.attempt.group
            outgoing.give_up(
                IncompleteGroupError(f"{answer.detail} of {group.rows} rows were accepted when the group was finished")
            )
        else:
            outgoing.give_up(LostAttemptError(answer.status))


def _first_step(rows: dict[int, Payload]) -> dict[int, Payload]:
    first: dict[int, Payload] = {}
    size = 0
    for at, payload in rows.items():
        if first and size + payload.size > STEP_BYTES:
            break
        first[at] = payload
        size += payload.size
    return first


def _share(rows: dict[int, Payload], timing: Callable[[], str]) -> list[Rows]:
    """Rows as entries of up to ENTRY_BYTES; the last one carries the instance's times where there are any to tell."""
    chunks = _chunks(rows.items())
    return [
        Rows(
            tuple([at for at, _ in chunk]),
            frame([payload for _, payload in chunk]),
            timing() if chunk is chunks[-1] else "",
        )
        for chunk in chunks
    ]


def _chunks(rows: Iterable[tuple[int, Payload]]) -> list[list[tuple[int, Payload]]]:
    chunks: list[list[tuple[int, Payload]]] = []
    size = ENTRY_BYTES
    for at, payload in rows:
        if size + payload.size > ENTRY_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append((at, payload))
        size += payload.size
    return chunks

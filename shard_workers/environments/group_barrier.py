"""Where the rows of one prompt group meet, for verifiers that score a rollout against its siblings.

Promises that nobody waits for a sibling that can no longer come: a row that fails, is cancelled, or returns
without contributing breaks the meeting for all who wait in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...broker.errors import EnvironmentContractError, RolloutBusError
from .exits import text_of


class GroupBrokenError(RolloutBusError, RuntimeError):
    """A sibling that this rollout must be compared with is gone; `__cause__` is what the sibling failed
    with, if it did.
    """


class Slot:
    """One row's share of its entry's `max_concurrency`; without a limit it is always free."""

    def __init__(self, limit: asyncio.Semaphore | None = None) -> None:
        self._limit = limit
        self._held = False

    async def acquire(self) -> None:
        """Wait for a free slot, unless this row holds one."""
        if self._limit is not None and not self._held:
            await self._limit.acquire()
            self._held = True

    def release(self) -> None:
        """Give the slot back, if this row holds one."""
        if self._limit is not None and self._held:
            self._held = False
            self._limit.release()


@dataclass(slots=True)
class _Round:
    values: dict[int, Any] = field(default_factory=dict[int, Any])
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class GroupBarrier:
    """One group's meetings: the n-th `gather` of a row meets the n-th of each sibling."""

    def __init__(self, row_names: Sequence[object]) -> None:
        self._names = list(row_names)
        self._rounds: list[_Round] = []
        self._arrivals = [0] * len(self._names)
        self._left: dict[int, BaseException | None] = {}

    @property
    def size(self) -> int:
        """How many rows of the group are in this call."""
        return len(self._names)

    def seat(self, position: int, slot: Slot | None = None) -> GroupSeat:
        """The face of this barrier for the row at `position`."""
        return GroupSeat(self, position, slot or Slot())

    def leave(self, position: int, error: BaseException | None) -> None:
        """Record that a row has ended, and wake everybody who would wait for it in vain."""
        self._left[position] = error
        for number, meeting in enumerate(self._rounds):
            if self._missing(number) is not None:
                meeting.settled.set()

    async def meet(self, position: int, value: Any) -> list[Any]:
        """Contribute `value` and wait for the siblings' values of the same round, in row order."""
        number = self._arrivals[position]
        self._arrivals[position] += 1
        if number == len(self._rounds):
            self._rounds.append(_Round())
        meeting = self._rounds[number]
        meeting.values[position] = value
        if len(meeting.values) == self.size or self._missing(number) is not None:
            meeting.settled.set()
        await meeting.settled.wait()
        if len(meeting.values) < self.size:
            raise self._broken(number)
        return [meeting.values[seat] for seat in range(self.size)]

    def _missing(self, number: int) -> int | None:
        """The row that spoils an unfinished round: it failed, or ended before it came to that round."""
        for position, error in self._left.items():
            if error is not None or self._arrivals[position] <= number:
                return position
        return None

    def _broken(self, number: int) -> GroupBrokenError:
        position = self._missing(number)
        assert position is not None
        error = self._left[position]
        what = (
            f"failed with {type(error).__name__}: {text_of(error)}"
            if error is not None
            else "returned without calling gather"
        )
        broken = GroupBrokenError(
            f"row {self._names[position]} (sibling {position + 1} of {self.size}) {what}; "
            f"a group-scored rollout needs a value from each of its siblings"
        )
        # The worker retries by what really failed, which for the siblings is not this error.
        broken.__cause__ = error
        return broken


class GroupSeat:
    """What a rollout sees of its group, as `context.group`."""

    def __init__(self, barrier: GroupBarrier, position: int, slot: Slot) -> None:
        self._barrier = barrier
        self._slot = slot
        self._waiting = False
        self.position = position
        self.size = barrier.size

    async def gather(self, value: Any) -> list[Any]:
        """Give `value` and get every sibling's, in row order and with one's own, once all have given
        theirs.

        Raises `GroupBrokenError` as soon as a sibling can no longer contribute. While it waits, the row
        does not count against `max_concurrency`. Under `rerun: missing` only the rows that run again are
        siblings.
        """
        if self._waiting:
            raise EnvironmentContractError("one rollout may wait in one gather at a time; await them one after another")
        # A waiting row must not keep its slot: with more siblings than slots, nobody would ever arrive.
        self._slot.release()
        self._waiting = True
        try:
            return await self._meet_then_resume(value)
        finally:
            self._waiting = False

    async def _meet_then_resume(self, value: Any) -> list[Any]:
        try:
            values = await self._barrier.meet(self.position, value)
        except GroupBrokenError:
            await self._slot.acquire()
            raise
        await self._slot.acquire()
        return values

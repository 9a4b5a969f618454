"""Finished rows on their way into the broker: together where they finish together, once, and ended by the broker's
word.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import pytest
from rolloutbus.broker.channel import Payload
from rolloutbus.broker.errors import BrokerUnavailableError
from rolloutbus.broker.messages import GroupEntry
from rolloutbus.broker.worker_transitions import Acceptance, Accepted, Attempt
from rolloutbus.shard_workers.finishing import (
    ENTRY_BYTES,
    STEP_BYTES,
    WAITING_BYTES,
    Finisher,
    IncompleteGroupError,
    LostAttemptError,
    Outgoing,
)
from rolloutbus.shard_workers.timing import InstanceTiming

LIMIT_S = 10
Answering = Callable[[Sequence[Acceptance]], Awaitable[list[Accepted]]]


class Broker:
    """Plays the transitions: notes what is written and answers as the test says, `ok` otherwise."""

    def __init__(self) -> None:
        self.writes: list[Sequence[Acceptance]] = []
        self.answers: list[list[Accepted] | Exception] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.written = asyncio.Event()

    async def accept(self, acceptances: Sequence[Acceptance]) -> list[Accepted]:
        self.writes.append(acceptances)
        self.written.set()
        await self.may_answer.wait()
        answer = self.answers.pop(0) if self.answers else [Accepted("ok")] * len(acceptances)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Desk:
    """A running finisher and its broker."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.finisher = Finisher(self.broker, InstanceTiming("me"))  # pyright: ignore[reportArgumentType]

    def begin(self, group: int = 0, *, whole: bool = False, rows: int = 4, batch: str = "b") -> Outgoing:
        attempt = Attempt(GroupEntry("1-0", batch, group, "c", "a", rows, group * rows, b""), f"token{group}", 1)
        return self.finisher.begin(attempt, whole=whole, missing=rows)

    def positions(self) -> list[list[tuple[int, ...]]]:
        return [[acceptance.positions for acceptance in write] for write in self.broker.writes]

    def times_told(self) -> list[list[bool]]:
        """By write, whether its entries tell the instance's times."""
        return [[bool(rows.timing) for step in write for rows in step.rows] for write in self.broker.writes]


@pytest.fixture
async def desk() -> AsyncGenerator[Desk]:
    desk = Desk()
    running = asyncio.create_task(desk.finisher.run())
    yield desk
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def payload(size: int = 10) -> Payload:
    return Payload([bytes(size)], size)


async def settled(outgoing: Outgoing) -> None:
    await asyncio.wait_for(asyncio.shield(outgoing.settled), LIMIT_S)


async def test_rows_that_finish_in_one_tick_travel_in_one_step_and_one_entry(desk: Desk) -> None:
    one, other = desk.begin(0), desk.begin(1)
    for at in range(4):
        desk.finisher.add(one, at, payload())
    desk.finisher.add(other, 2, payload())
    desk.finisher.complete(one)
    await settled(one)
    assert desk.positions() == [[(0, 1, 2, 3), (2,)]]
    first, second = desk.broker.writes[0]
    assert (first.finish, len(first.rows)) == (True, 1)
    assert (second.finish, second.attempt.group.group) == (False, 1)
    desk.finisher.drop(other)


async def test_a_row_does_not_wait_for_its_siblings(desk: Desk) -> None:
    outgoing = desk.begin(rows=2)
    desk.finisher.add(outgoing, 1, payload())
    await asyncio.wait_for(desk.broker.written.wait(), LIMIT_S)
    assert desk.positions() == [[(1,)]]
    desk.finisher.add(outgoing, 0, payload())
    desk.finisher.complete(outgoing)
    await settled(outgoing)


async def test_rows_that_finish_during_a_write_travel_together_in_the_next(desk: Desk) -> None:
    outgoing = desk.begin()
    desk.broker.may_answer.clear()
    desk.finisher.add(outgoing, 0, payload())
    await asyncio.wait_for(desk.broker.written.wait(), LIMIT_S)
    for at in (1, 2):
        desk.finisher.add(outgoing, at, payload())
        await asyncio.sleep(0)
    desk.finisher.add(outgoing, 3, payload())
    desk.finisher.complete(outgoing)
    desk.broker.may_answer.set()
    await settled(outgoing)
    assert desk.positions() == [[(0,)], [(1, 2, 3)]]


async def test_a_whole_group_shows_nothing_before_it_is_complete(desk: Desk) -> None:
    held, passing = desk.begin(0, whole=True), desk.begin(1, rows=1)
    for at in range(4):
        desk.finisher.add(held, at, payload(STEP_BYTES))
    desk.finisher.add(passing, 0, payload())
    desk.finisher.complete(passing)
    await settled(passing)
    assert desk.positions() == [[(0,)]]
    desk.finisher.complete(held)
    await settled(held)
    assert desk.positions()[1:] == [[(0, 1, 2, 3)]]


async def test_the_times_travel_with_the_last_row_even_when_the_environment_ends_later(desk: Desk) -> None:
    """They used to travel with the finish, which has no entry to carry them once the last row has gone ahead."""
    outgoing = desk.begin(rows=2)
    for at in range(2):
        desk.broker.written.clear()
        desk.finisher.add(outgoing, at, payload())
        await asyncio.wait_for(desk.broker.written.wait(), LIMIT_S)
    desk.finisher.complete(outgoing)
    await settled(outgoing)
    assert desk.times_told() == [[False], [True], []]
    assert [write[0].finish for write in desk.broker.writes] == [False, False, True]


async def test_large_rows_have_entries_and_steps_of_their_own_and_the_last_finishes(desk: Desk) -> None:
    outgoing = desk.begin(rows=8)
    for at in range(8):
        desk.finisher.add(outgoing, at, payload(STEP_BYTES // 2 + 1))
    desk.finisher.complete(outgoing)
    await settled(outgoing)
    acceptances = [acceptance for write in desk.broker.writes for acceptance in write]
    assert [a.positions for a in acceptances] == [(at,) for at in range(8)]
    assert [a.finish for a in acceptances] == [False] * 7 + [True]
    assert [told for write in desk.times_told() for told in write] == [False] * 7 + [True]


async def test_each_group_that_ends_tells_the_times_of_its_batch(desk: Desk) -> None:
    """Once they were told with the last group of a write only; when that one was refused, nobody heard them."""
    outgoing = [desk.begin(0, rows=1), desk.begin(1, rows=1, batch="other"), desk.begin(2, rows=1), desk.begin(3)]
    for one in outgoing:
        desk.finisher.add(one, 0, payload())
    for one in outgoing[:3]:
        desk.finisher.complete(one)
    for one in outgoing[:3]:
        await settled(one)
    assert desk.times_told() == [[True, True, True, False]]
    desk.finisher.drop(outgoing[3])


async def test_small_rows_share_entries_up_to_their_bound(desk: Desk) -> None:
    outgoing = desk.begin(rows=5)
    for at in range(5):
        desk.finisher.add(outgoing, at, payload(ENTRY_BYTES // 2))
    desk.finisher.complete(outgoing)
    await settled(outgoing)
    entries = [rows.positions for write in desk.broker.writes for acceptance in write for rows in acceptance.rows]
    assert [at for positions in entries for at in positions] == list(range(5))
    assert max(map(len, entries)) == 2


async def test_it_tells_about_how_much_the_latest_groups_results_are(desk: Desk) -> None:
    for size in (1000, 50):
        for group in range(40):
            outgoing = desk.begin(group, rows=2)
            desk.finisher.add(outgoing, 0, payload(size))
            desk.finisher.add(outgoing, 1, payload(size))
            desk.finisher.complete(outgoing)
            await settled(outgoing)
        assert desk.finisher.group_bytes == pytest.approx(2 * size, rel=0.01)


async def test_what_waits_or_is_unanswered_can_be_waited_for(desk: Desk) -> None:
    outgoing = desk.begin()
    desk.broker.may_answer.clear()
    await asyncio.wait_for(desk.finisher.written(outgoing), LIMIT_S)
    desk.finisher.add(outgoing, 0, payload())
    await desk.broker.written.wait()
    desk.finisher.add(outgoing, 1, payload())
    waiting = asyncio.create_task(desk.finisher.written(outgoing))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    desk.broker.may_answer.set()
    await asyncio.wait_for(waiting, LIMIT_S)
    assert desk.positions() == [[(0,)], [(1,)]]


@pytest.mark.parametrize("answer", [[Accepted("stale")], BrokerUnavailableError("gone")], ids=["refused", "away"])
async def test_nobody_waits_for_what_will_not_be_written(desk: Desk, answer: list[Accepted] | Exception) -> None:
    outgoing = desk.begin()
    desk.broker.answers = [answer]
    desk.finisher.add(outgoing, 0, payload())
    await asyncio.wait_for(desk.finisher.written(outgoing), LIMIT_S)
    assert isinstance(outgoing.settled.exception(), (LostAttemptError, BrokerUnavailableError))


async def test_rows_that_are_held_back_are_not_waited_for(desk: Desk) -> None:
    outgoing = desk.begin(whole=True)
    desk.finisher.add(outgoing, 0, payload())
    await asyncio.wait_for(desk.finisher.written(outgoing), LIMIT_S)
    assert desk.broker.writes == []


async def test_a_repeated_finish_is_a_finish(desk: Desk) -> None:
    outgoing = desk.begin(rows=1)
    desk.broker.answers = [[Accepted("repeated")]]
    desk.finisher.add(outgoing, 0, payload())
    desk.finisher.complete(outgoing)
    await settled(outgoing)


async def test_what_was_accepted_before_is_dropped_and_the_rest_is_sent_again(desk: Desk) -> None:
    outgoing = desk.begin()
    desk.broker.answers = [[Accepted("duplicate", 0, "1,3")]]
    for at in range(4):
        desk.finisher.add(outgoing, at, payload())
    desk.finisher.complete(outgoing)
    await settled(outgoing)
    assert desk.positions() == [[(0, 1, 2, 3)], [(0, 2)]]
    assert [write[0].finish for write in desk.broker.writes] == [True, True]


async def test_a_group_all_of_whose_rows_were_accepted_before_is_finished_without_rows(desk: Desk) -> None:
    outgoing = desk.begin(rows=2)
    desk.broker.answers = [[Accepted("duplicate", 0, "0,1")]]
    for at in range(2):
        desk.finisher.add(outgoing, at, payload())
    desk.finisher.complete(outgoing)
    await settled(outgoing)
    assert desk.positions() == [[(0, 1)], [()]]


@pytest.mark.parametrize("status", ["stale", "gone"])
async def test_a_refused_write_ends_the_attempt_and_says_why(desk: Desk, status: str) -> None:
    outgoing = desk.begin()
    desk.broker.answers = [[Accepted(status)]]
    desk.finisher.add(outgoing, 0, payload())
    with pytest.raises(LostAttemptError, match=status):
        await settled(outgoing)
    desk.finisher.drop(outgoing)


async def test_a_finish_that_does_not_cover_the_group_is_an_error_that_another_attempt_may_mend(desk: Desk) -> None:
    outgoing = desk.begin()
    desk.broker.answers = [[Accepted("incomplete", 0, "2")]]
    desk.finisher.complete(outgoing)
    with pytest.raises(IncompleteGroupError, match="2 of 4 rows") as caught:
        await settled(outgoing)
    assert isinstance(caught.value, ConnectionError)
    desk.finisher.drop(outgoing)


async def test_a_broker_that_stays_away_ends_all_attempts_of_the_write_and_not_the_finisher(desk: Desk) -> None:
    lost = [desk.begin(0), desk.begin(1)]
    desk.broker.answers = [BrokerUnavailableError("away")]
    for outgoing in lost:
        desk.finisher.add(outgoing, 0, payload())
    for outgoing in lost:
        with pytest.raises(BrokerUnavailableError):
            await settled(outgoing)
        desk.finisher.drop(outgoing)
    later = desk.begin(2, rows=1)
    desk.finisher.add(later, 0, payload())
    desk.finisher.complete(later)
    await settled(later)


async def test_an_attempt_that_ended_another_way_writes_nothing_more(desk: Desk) -> None:
    dropped, other = desk.begin(0), desk.begin(1, rows=1)
    desk.finisher.add(dropped, 0, payload())
    desk.finisher.drop(dropped)
    desk.finisher.add(other, 0, payload())
    desk.finisher.complete(other)
    await settled(other)
    assert [acceptance.attempt.group.group for write in desk.broker.writes for acceptance in write] == [1]
    assert dropped.settled.cancelled()


async def test_while_too_much_waits_the_next_row_is_not_asked_for(desk: Desk) -> None:
    """A broker that takes nothing must not fill the worker's memory: who gave a row waits until there is room again."""
    desk.broker.may_answer.clear()
    outgoing = [desk.begin(group) for group in range(6)]
    large = WAITING_BYTES // 4
    desk.finisher.add(outgoing[0], 0, payload())
    await asyncio.wait_for(desk.broker.written.wait(), LIMIT_S)
    waits = [desk.finisher.add(one, 1, payload(large)) for one in outgoing]
    assert [wait is None for wait in waits] == [True, True, True, False, False, False]
    desk.broker.may_answer.set()
    await asyncio.wait_for(asyncio.gather(*[wait for wait in waits if wait is not None]), LIMIT_S)
    assert desk.finisher.add(outgoing[0], 2, payload()) is None
    for one in outgoing:
        desk.finisher.drop(one)


async def test_a_group_that_is_dropped_makes_room(desk: Desk) -> None:
    desk.broker.may_answer.clear()
    first, second = desk.begin(0), desk.begin(1)
    desk.finisher.add(first, 0, payload())
    await asyncio.wait_for(desk.broker.written.wait(), LIMIT_S)
    waits = [desk.finisher.add(first, 1, payload(WAITING_BYTES)), desk.finisher.add(second, 1, payload())]
    assert None not in waits
    desk.finisher.drop(first)
    await asyncio.wait_for(asyncio.gather(*[wait for wait in waits if wait is not None]), LIMIT_S)
    desk.finisher.drop(second)


async def test_a_group_that_is_held_back_waits_for_nobody(desk: Desk) -> None:
    """Its rows go out when it is complete, so that waiting for room before would be waiting for itself."""
    held = desk.begin(whole=True)
    for at in range(4):
        assert desk.finisher.add(held, at, payload(WAITING_BYTES)) is None
    desk.finisher.complete(held)
    await settled(held)


async def test_the_oldest_group_has_room_first(desk: Desk) -> None:
    """Rows of many groups in turn would let all of them end at the end."""
    desk.broker.may_answer.clear()
    outgoing = [desk.begin(group) for group in range(3)]
    desk.finisher.add(outgoing[0], 0, payload())
    await asyncio.wait_for(desk.broker.written.wait(), LIMIT_S)
    went_on: list[int] = []

    async def wait_for_room(group: int) -> None:
        room = desk.finisher.add(outgoing[group], 1, payload(WAITING_BYTES))
        assert room is not None
        await room
        went_on.append(group)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        for group in (2, 0, 1):
            tasks.create_task(wait_for_room(group))
        await asyncio.sleep(0)
        for one in outgoing:
            desk.finisher.drop(one)
    assert went_on == [0, 1, 2]

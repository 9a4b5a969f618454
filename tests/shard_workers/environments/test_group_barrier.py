"""Siblings that meet, and siblings that can no longer come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rolloutbus.broker.errors import EnvironmentContractError
from rolloutbus.shard_workers.environments.group_barrier import GroupBarrier, GroupBrokenError, Slot


async def waiting(*tasks: asyncio.Task[Any]) -> None:
    """Let every task run as far as it can, and see that none has ended."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_values_come_in_row_order_whoever_arrives_first() -> None:
    barrier = GroupBarrier([10, 11, 12])
    early = [asyncio.create_task(barrier.seat(place).gather(f"value {place}")) for place in (2, 0)]
    await waiting(*early)
    last = await barrier.seat(1).gather("value 1")
    assert [last, *(await asyncio.gather(*early))] == [["value 0", "value 1", "value 2"]] * 3


async def test_a_group_of_one_meets_itself() -> None:
    assert await GroupBarrier([0]).seat(0).gather("alone") == ["alone"]


async def test_the_same_rows_meet_again_round_by_round() -> None:
    barrier = GroupBarrier([0, 1])

    async def three_rounds(place: int) -> list[list[int]]:
        seat = barrier.seat(place)
        return [await seat.gather(10 * number + place) for number in range(3)]

    rounds = [[0, 1], [10, 11], [20, 21]]
    assert await asyncio.gather(three_rounds(0), three_rounds(1)) == [rounds, rounds]


async def test_every_sibling_gets_a_list_of_its_own() -> None:
    barrier = GroupBarrier([0, 1])
    first, second = await asyncio.gather(barrier.seat(0).gather(1), barrier.seat(1).gather(2))
    first.clear()
    assert second == [1, 2]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad"), "failed with ValueError: bad"),
        (None, "returned without calling gather"),
    ],
)
async def test_who_waits_learns_which_sibling_will_not_come(error: Exception | None, said: str) -> None:
    barrier = GroupBarrier([40, 41, 42])
    early = asyncio.create_task(barrier.seat(0).gather("here"))
    await waiting(early)
    barrier.leave(2, error)
    late = barrier.seat(1).gather("here too")
    for outcome in await asyncio.gather(early, late, return_exceptions=True):
        assert isinstance(outcome, GroupBrokenError)
        assert f"row 42 (sibling 3 of 3) {said}" in str(outcome)
        assert outcome.__cause__ is error


@pytest.mark.parametrize("error", [ValueError("bad"), None])
async def test_who_comes_first_after_a_sibling_has_left_does_not_wait(error: Exception | None) -> None:
    barrier = GroupBarrier([0, 1])
    barrier.leave(1, error)
    async with asyncio.timeout(5):
        with pytest.raises(GroupBrokenError, match="row 1"):
            await barrier.seat(0).gather("here")


async def test_a_sibling_that_contributed_and_then_failed_breaks_the_meeting_too() -> None:
    barrier = GroupBarrier([0, 1, 2])
    contributed = asyncio.create_task(barrier.seat(0).gather("mine"))
    other = asyncio.create_task(barrier.seat(1).gather("mine"))
    await waiting(contributed, other)
    contributed.cancel()
    barrier.leave(0, TimeoutError("gave up"))
    with pytest.raises(GroupBrokenError, match=r"row 0 .*TimeoutError: gave up"):
        await other
    await asyncio.wait([contributed])


async def test_a_finished_meeting_is_not_spoilt_by_who_leaves_after_it() -> None:
    barrier = GroupBarrier([0, 1])
    early = asyncio.create_task(barrier.seat(0).gather("a"))
    await waiting(early)
    assert await barrier.seat(1).gather("b") == ["a", "b"]
    barrier.leave(1, ValueError("later"))
    assert await early == ["a", "b"]


async def test_two_gathers_of_one_rollout_at_once_are_refused() -> None:
    seat = GroupBarrier([0, 1]).seat(0)
    first = asyncio.create_task(seat.gather(1))
    await waiting(first)
    with pytest.raises(EnvironmentContractError, match="one after another"):
        await seat.gather(2)
    first.cancel()
    await asyncio.wait([first])


async def test_a_waiting_row_lends_its_slot_and_takes_one_back() -> None:
    limit = asyncio.Semaphore(1)
    slot = Slot(limit)
    await slot.acquire()
    barrier = GroupBarrier([0, 1])
    early = asyncio.create_task(barrier.seat(0, slot).gather("a"))
    await waiting(early)
    assert not limit.locked()
    await barrier.seat(1).gather("b")
    await early
    assert limit.locked()
    slot.release()
    slot.release()
    assert limit._value == 1  # pyright: ignore[reportPrivateUsage]


async def test_a_row_whose_meeting_breaks_takes_its_slot_back_before_it_goes_on() -> None:
    limit = asyncio.Semaphore(1)
    slot = Slot(limit)
    await slot.acquire()
    barrier = GroupBarrier([0, 1])
    barrier.leave(1, None)
    with pytest.raises(GroupBrokenError):
        await barrier.seat(0, slot).gather("a")
    assert limit.locked()


async def test_a_cancelled_wait_ends_without_waiting_for_a_slot() -> None:
    limit = asyncio.Semaphore(1)
    slot = Slot(limit)
    await slot.acquire()
    early = asyncio.create_task(GroupBarrier([0, 1]).seat(0, slot).gather("a"))
    await waiting(early)
    await limit.acquire()
    early.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([early])
    assert early.cancelled()

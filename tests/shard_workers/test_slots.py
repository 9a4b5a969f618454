"""How many groups an instance runs at once: never more, and nobody sleeps beside a free place."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.shard_workers.slots import Slots

LIMIT_S = 10


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_place_can_be_had_while_one_is_free() -> None:
    slots = Slots(2)
    assert [slots.occupy_now() for _ in range(3)] == [True, True, False]
    assert (slots.free, slots.used) == (0, 2)
    slots.release()
    assert slots.occupy_now()


async def test_those_who_wait_are_served_in_order() -> None:
    slots = Slots(1)
    served: list[int] = []

    async def occupy(number: int) -> None:
        await slots.occupy()
        served.append(number)

    slots.occupy_now()
    tasks = [asyncio.create_task(occupy(number)) for number in range(3)]
    for _ in tasks:
        await settle()
        slots.release()
    await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
    assert served == [0, 1, 2]
    assert slots.used == 1


async def test_one_who_only_wants_to_know_does_not_keep_a_place_from_one_who_takes_it() -> None:
    """A reader that was woken went to sleep at the broker, and a group that had been claimed waited beside a free slot
    for ever.
    """
    slots = Slots(1)
    slots.occupy_now()
    curious = asyncio.create_task(slots.any_free())
    await settle()
    taker = asyncio.create_task(slots.occupy())
    await settle()
    slots.release()
    await asyncio.wait_for(asyncio.gather(curious, taker), LIMIT_S)
    assert slots.free == 0


async def test_one_who_goes_ahead_has_the_next_place_before_one_who_looks_for_any() -> None:
    slots = Slots(1)
    slots.occupy_now()
    seen: list[str] = []

    async def look() -> None:
        await slots.any_free()
        seen.append("look")

    async def go_ahead() -> None:
        async with slots.ahead():
            seen.append("ahead")
            await settle()
            await slots.occupy()
            seen.append("taken")

    tasks = [asyncio.create_task(look()), asyncio.create_task(go_ahead())]
    await settle()
    slots.release()
    await asyncio.wait_for(tasks[1], LIMIT_S)
    assert seen == ["ahead", "taken"]
    slots.release()
    await asyncio.wait_for(tasks[0], LIMIT_S)
    assert seen == ["ahead", "taken", "look"]


async def test_one_who_is_cancelled_while_he_goes_ahead_lets_the_others_look() -> None:
    slots = Slots(1)
    slots.occupy_now()
    entered = asyncio.create_task(slots.ahead().__aenter__())
    looking = asyncio.create_task(slots.any_free())
    await settle()
    entered.cancel()
    slots.release()
    await asyncio.wait_for(looking, LIMIT_S)
    assert entered.cancelled()


async def test_a_cancelled_waiter_does_not_keep_the_word_to_itself() -> None:
    slots = Slots(1)
    slots.occupy_now()
    cancelled, patient = asyncio.create_task(slots.occupy()), asyncio.create_task(slots.occupy())
    await settle()
    slots.release()
    cancelled.cancel()
    await asyncio.wait_for(patient, LIMIT_S)
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert slots.used == 1


@given(st.integers(1, 4), st.lists(st.sampled_from(["take", "know", "give"]), max_size=30))
def test_never_more_than_all_are_taken_and_all_waiters_are_served_in_the_end(total: int, steps: list[str]) -> None:
    async def run() -> None:
        slots = Slots(total)
        waiting: list[asyncio.Task[None]] = []
        for step in steps:
            if step == "give" and slots.used > 0:
                slots.release()
            elif step != "give":
                waiting.append(asyncio.create_task(slots.occupy() if step == "take" else slots.any_free()))
            await settle()
            assert 0 <= slots.free <= total
        while not all(task.done() for task in waiting):
            if slots.used:
                slots.release()
            await settle()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))

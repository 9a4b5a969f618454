"""Items reach whoever asks, from any event loop and thread; a waiter that is cancelled takes nothing with it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from rolloutbus.trainer.outbox import Outbox

LIMIT_S = 20


async def test_items_come_in_order_whether_they_were_there_or_awaited() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put(1)
    waiting = asyncio.gather(outbox.get(), outbox.get())
    await asyncio.sleep(0)
    outbox.put(2)
    assert await waiting == [1, 2]
    assert len(outbox) == 0


async def test_a_cancelled_waiter_takes_nothing() -> None:
    outbox: Outbox[str] = Outbox()
    cancelled = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    outbox.put("x")
    assert await asyncio.wait_for(outbox.get(), LIMIT_S) == "x"


@pytest.mark.parametrize("put_first", [True, False])
async def test_a_waiter_that_is_woken_and_cancelled_at_once_passes_the_word_on(put_first: bool) -> None:
    outbox: Outbox[str] = Outbox()
    cancelled = asyncio.create_task(outbox.get())
    patient = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    for step in (lambda: outbox.put("x"), lambda: cancelled.cancel())[:: 1 if put_first else -1]:
        step()
    done, _ = await asyncio.wait({cancelled, patient}, timeout=LIMIT_S, return_when="FIRST_COMPLETED")
    assert done
    if cancelled.cancelled():
        assert await asyncio.wait_for(patient, LIMIT_S) == "x"
    else:
        assert await cancelled == "x"
        patient.cancel()


async def test_the_first_end_is_given_to_all_who_ask_and_to_those_who_wait() -> None:
    outbox: Outbox[str] = Outbox()
    waiting = asyncio.gather(outbox.get(), outbox.get(), outbox.get())
    await asyncio.sleep(0)
    outbox.end("end")
    outbox.end("later")
    assert await asyncio.wait_for(waiting, LIMIT_S) == ["end"] * 3
    assert await outbox.get() == "end"


@pytest.mark.parametrize("put_back", [True, False])
async def test_the_end_comes_only_when_nobody_has_anything_in_hand(put_back: bool) -> None:
    outbox: Outbox[str] = Outbox()
    outbox.put("x")
    outbox.end("end")
    assert await outbox.get() == "x"
    waiting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    if put_back:
        outbox.put_back("x")
        assert await asyncio.wait_for(waiting, LIMIT_S) == "x"
    outbox.settle()
    assert await asyncio.wait_for(outbox.get() if put_back else waiting, LIMIT_S) == "end"


async def test_an_end_said_at_once_takes_the_place_of_another() -> None:
    outbox: Outbox[str] = Outbox()
    outbox.end("well")
    outbox.end("badly", at_once=True)
    assert await outbox.get() == "badly"


def test_several_loops_threads_and_cancelled_waiters_lose_and_double_nothing() -> None:
    outbox: Outbox[int] = Outbox()
    total, consumers = 3000, 4
    got: list[int] = []

    async def consume(impatient: bool) -> None:
        while True:
            try:
                item = await asyncio.wait_for(outbox.get(), 0.0005 if impatient else None)
            except TimeoutError:
                continue
            if item < 0:
                return
            got.append(item)

    def produce(first: int) -> None:
        for item in range(first, total, 2):
            outbox.put(item)

    with ThreadPoolExecutor(consumers + 3) as pool:
        readers = [pool.submit(asyncio.run, consume(impatient)) for impatient in (True, False) * (consumers // 2)]
        writers = [pool.submit(produce, first) for first in (0, 1)]
        for writer in writers:
            writer.result(LIMIT_S)
        for _ in readers:
            outbox.put(-1)
        for reader in readers:
            reader.result(LIMIT_S)
    assert sorted(got) == list(range(total))


def test_a_loop_that_ended_while_waiting_does_not_keep_the_next_item() -> None:
    outbox: Outbox[str] = Outbox()

    async def give_up() -> None:
        task = asyncio.create_task(outbox.get())
        await asyncio.sleep(0)
        del task

    asyncio.run(give_up())
    outbox.put("x")
    assert asyncio.run(asyncio.wait_for(outbox.get(), LIMIT_S)) == "x"

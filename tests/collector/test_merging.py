"""Merging result streams: completion order, one failing source named, and nothing left running whatever the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.collector import SourceFailedError, merge_shard_streams


class Source:
    """A stream whose items, end or error the test decides on."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = 0
        self.closed = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self.items.get()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(item, BaseException):
            raise item
        return item

    async def aclose(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncGenerator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert left == set()


async def drain(sources: dict[str, Source]) -> list[Any]:
    return [item async for item in merge_shard_streams(sources)]


async def test_no_streams_give_no_items() -> None:
    assert await drain({}) == []


async def test_items_come_as_they_complete_and_a_slow_stream_holds_up_no_other() -> None:
    slow, fast = Source(), Source()
    merged = merge_shard_streams({"slow": slow, "fast": fast})
    for number in range(5):
        fast.items.put_nowait(number)
        assert await anext(merged) == number
    slow.items.put_nowait("late")
    assert await anext(merged) == "late"
    slow.items.put_nowait(StopAsyncIteration())
    fast.items.put_nowait("last")
    assert await anext(merged) == "last"
    fast.items.put_nowait(StopAsyncIteration())
    assert [item async for item in merged] == []
    assert (slow.closed, fast.closed) == (1, 1)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_no_item_is_lost_and_each_stream_keeps_its_order(order: list[int]) -> None:
    async def run() -> list[Any]:
        sources = {f"s/{number}": Source() for number in range(6)}
        merged = merge_shard_streams(sources)
        got: list[Any] = []
        ready = asyncio.Event()

        async def consume() -> None:
            async for item in merged:
                got.append(item)
                ready.set()

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(0)
        for at, number in enumerate(order):
            sources[f"s/{number}"].items.put_nowait(at)
            await asyncio.sleep(0)
        for source in sources.values():
            source.items.put_nowait(StopAsyncIteration())
        await consumer
        return got

    got = asyncio.run(run())
    assert sorted(got) == list(range(len(order)))
    for number in range(6):
        mine = [at for at in got if order[at] == number]
        assert mine == sorted(mine)


async def test_items_that_complete_in_one_tick_keep_their_order() -> None:
    sources = {name: Source() for name in "abcdefgh"}
    merged = merge_shard_streams(sources)
    first = asyncio.ensure_future(anext(merged))
    await asyncio.sleep(0.001)
    for name in "hgfedcba":
        sources[name].items.put_nowait(name)
    got = [await first, *[await anext(merged) for _ in range(7)]]
    assert got == list("hgfedcba")
    await merged.aclose()


async def test_a_failing_source_is_named_after_what_came_before_and_ends_the_others() -> None:
    good, bad = Source(), Source()
    merged = merge_shard_streams({"math/0": good, "math/1": bad})
    good.items.put_nowait("before")
    bad.items.put_nowait(ValueError("out of paper"))
    assert await anext(merged) == "before"
    await asyncio.sleep(0)
    with pytest.raises(SourceFailedError, match=r"math/1 ended with ValueError: out of paper") as caught:
        await anext(merged)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.label == "math/1"
    assert good.cancelled == 1
    assert (good.closed, bad.closed) == (1, 1)


async def test_a_source_that_cancels_itself_is_a_failing_source() -> None:
    bad = Source()
    bad.items.put_nowait(asyncio.CancelledError())
    with pytest.raises(SourceFailedError, match="math ended with CancelledError"):
        await drain({"math": bad})


async def test_closed_early_it_cancels_what_is_pending_and_closes_every_source() -> None:
    one, other = Source(), Source()
    merged = merge_shard_streams({"one": one, "other": other})
    one.items.put_nowait(1)
    assert await anext(merged) == 1
    await asyncio.sleep(0)
    await merged.aclose()
    assert (one.cancelled, other.cancelled) == (1, 1)
    assert (one.closed, other.closed) == (1, 1)


async def test_cancelled_it_cancels_what_is_pending_and_closes_every_source() -> None:
    sources = {"one": Source(), "other": Source()}
    consumer = asyncio.create_task(drain(sources))
    await asyncio.sleep(0.001)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert [(source.cancelled, source.closed) for source in sources.values()] == [(1, 1), (1, 1)]


async def test_a_source_that_fails_to_close_does_not_keep_the_others_open() -> None:
    class Stubborn(Source):
        async def aclose(self) -> None:
            raise OSError("stuck")

    stubborn, other = Stubborn(), Source()
    merged = merge_shard_streams({"stubborn": stubborn, "other": other})
    other.items.put_nowait(1)
    assert await anext(merged) == 1
    await merged.aclose()
    assert other.closed == 1


async def test_real_generators_run_their_own_cleaning_up() -> None:
    cleaned: list[str] = []

    async def stream(name: str) -> AsyncGenerator[str]:
        try:
            yield name
            await asyncio.Event().wait()
        finally:
            cleaned.append(name)

    merged = merge_shard_streams({name: stream(name) for name in "ab"})
    assert {await anext(merged), await anext(merged)} == {"a", "b"}
    await merged.aclose()
    assert sorted(cleaned) == ["a", "b"]

"""The thread that plain calls wait for: however it ends, they get a result or one of our errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from rolloutbus.broker.errors import ClosedError
from rolloutbus.shard_workers.fleet import loop_thread
from rolloutbus.shard_workers.fleet.loop_thread import LoopThread


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    monkeypatch.setattr(loop_thread, "_GIVE_WAY_S", 0.05)
    made = LoopThread("test")
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    made = ThreadPoolExecutor()
    yield made
    # A wait without an end would hold the test for ever.
    made.shutdown(wait=False)


def runs(thread: LoopThread, pool: ThreadPoolExecutor, work: Any) -> Future[Any]:
    """`thread.run(work)` in another thread; returns once the work has begun."""
    begun = threading.Event()

    async def begin() -> Any:
        begun.set()
        return await work

    waiting = pool.submit(thread.run, begin())
    assert begun.wait(10)
    return waiting


async def stubborn(again: int) -> None:
    for _ in range(again):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


def test_what_the_end_cancels_raises_an_error_that_plain_code_knows(
    thread: LoopThread, pool: ThreadPoolExecutor
) -> None:
    """It was asyncio's `CancelledError`, which passes by every `except Exception`."""
    waiting = runs(thread, pool, asyncio.sleep(60))
    thread.close()
    with pytest.raises(ClosedError, match="the thread test was ended meanwhile"):
        waiting.result(10)


def test_what_does_not_give_way_is_not_waited_for(thread: LoopThread, pool: ThreadPoolExecutor) -> None:
    """It was, for ever."""
    waiting = runs(thread, pool, stubborn(1000))
    thread.close()
    with pytest.raises(ClosedError, match="was ended meanwhile"):
        waiting.result(10)


def test_what_is_submitted_ends_too(thread: LoopThread) -> None:
    waiting = thread.submit(stubborn(1000))
    thread.run(asyncio.sleep(0))
    thread.close()
    with pytest.raises(ClosedError, match="was ended meanwhile"):
        waiting.result(10)


def test_what_comes_while_it_ends_is_refused(thread: LoopThread, pool: ThreadPoolExecutor) -> None:
    """It was begun in a loop that nobody ran any more, or never."""
    busy, free = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        free.wait(10)

    thread.loop.call_soon_threadsafe(hold)
    assert busy.wait(10)
    closing = pool.submit(thread.close)
    while not thread._closing:  # pyright: ignore[reportPrivateUsage]
        assert not closing.done()
    late = pool.submit(thread.run, asyncio.sleep(0))
    with pytest.raises(ClosedError, match="has ended"):
        late.result(5)
    free.set()
    closing.result(10)


def test_an_exit_at_the_end_leaves_nobody_waiting(thread: LoopThread, pool: ThreadPoolExecutor) -> None:
    async def leave() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise SystemExit(3)

    waiting = runs(thread, pool, stubborn(1000))
    thread.submit(leave())
    thread.run(asyncio.sleep(0))
    thread.close()
    with pytest.raises(ClosedError):
        waiting.result(10)


def test_many_who_ask_while_it_ends_all_hear(pool: ThreadPoolExecutor) -> None:
    def ask(thread: LoopThread) -> str:
        try:
            while True:
                thread.run(asyncio.sleep(0))
        except ClosedError as error:
            return str(error)

    for _ in range(50):
        thread = LoopThread("test")
        waiting = [pool.submit(ask, thread) for _ in range(3)]
        thread.close()
        assert all("the thread test" in asked.result(10) for asked in waiting)

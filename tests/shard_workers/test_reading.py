"""Reading groups on a real server: one at a time while a slot is free, stopped without losing a delivered one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from rolloutbus.broker.channel import Link
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.worker_transitions import Identity, WorkerTransitions
from rolloutbus.shard_workers.reading import MOST_AT_ONCE, SHORT_GROUP_S, GroupReader
from rolloutbus.shard_workers.slots import Slots

from tests.stacks import Stack, until, within


class Desk:
    """A reader of shard `s`, and what it delivered."""

    def __init__(self, stack: Stack, slots: int, name: str = "i") -> None:
        self.stack = stack
        self.identity = Identity("s", "s", name)
        self.link = Link(stack.settings, "control", load_scripts)
        self.transitions = WorkerTransitions(self.link, stack.keys, stack.settings, self.identity)
        self.reader = GroupReader(stack.settings, self.link, self.transitions, "reader")
        self.slots = Slots(slots)
        self.got: list[str] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for entry, _ in self.reader.entries(self.slots):
            await self.slots.occupy()
            self.got.append(bytes(entry).decode())

    def add(self, count: int = 1) -> list[str]:
        return [self.stack.redis.xadd(self.stack.keys.groups("s"), {"n": at}).decode() for at in range(count)]

    def pending(self) -> list[str]:
        raw = self.stack.redis.xpending_range(self.stack.keys.groups("s"), "workers", "-", "+", 1000)
        return [one["message_id"].decode() for one in raw if one["consumer"] == self.identity.consumer.encode()]

    async def close(self) -> None:
        await self.reader.stop()
        while not self.task.done():
            self.slots.release()
            await asyncio.sleep(0)
        await self.task
        await self.reader.close()
        await self.link.close()


@pytest.fixture
async def desk(stack: Stack) -> AsyncGenerator[Desk]:
    desk = Desk(stack, slots=100)
    await stack.reading("s", desk.identity.consumer)
    yield desk
    await desk.close()
    stack.redis.delete(stack.keys.groups("s"))


@within(10)
async def test_entries_come_in_order_as_they_are_added(desk: Desk) -> None:
    wanted = desk.add(3)
    await until(lambda: desk.got == wanted)
    wanted += desk.add(40)
    await until(lambda: desk.got == wanted)


@within(20)
async def test_no_more_is_taken_than_there_are_slots(stack: Stack) -> None:
    """Also behind a long queue, where several are read at once: what waited here could run on another replica."""
    desk = Desk(stack, slots=21)
    await stack.reading("s", desk.identity.consumer)
    wanted = desk.add(40)
    await until(lambda: len(desk.got) == 21)
    assert len(desk.pending()) == 21
    desk.slots.release()
    await until(lambda: len(desk.got) == 22)
    assert desk.pending() == desk.got == wanted[:22]
    await desk.close()
    stack.redis.delete(stack.keys.groups("s"))


@within(10)
async def test_a_reader_that_waits_stops_at_once(desk: Desk) -> None:
    await asyncio.wait_for(desk.reader.stop(), 2)
    await asyncio.wait_for(desk.task, 2)
    assert desk.got == []


@within(60)
async def test_stopping_loses_no_entry_that_was_delivered(stack: Stack) -> None:
    for round_number in range(40):
        desk = Desk(stack, slots=100, name=f"i{round_number}")
        await stack.reading("s", desk.identity.consumer)
        desk.add()
        if round_number % 2:
            await asyncio.sleep(0.0002 * (round_number % 7))
        await asyncio.wait_for(desk.reader.stop(), 5)
        await asyncio.wait_for(desk.task, 5)
        assert desk.got == desk.pending()
        await desk.close()
        stack.redis.delete(stack.keys.groups("s"))


@within(20)
async def test_after_a_lost_connection_what_was_delivered_before_comes_again(desk: Desk) -> None:
    first = desk.add(2)
    await until(lambda: desk.got == first)
    killed = [one["id"] for one in desk.stack.redis.client_list() if one["name"] == "rolloutbus:reader"]
    desk.stack.redis.client_kill_filter(_id=killed[0])
    await until(lambda: desk.got[2:4] == first)
    later = desk.add(1)
    await until(lambda: desk.got[-1] == later[0])


@within(20)
async def test_a_stream_that_was_deleted_is_made_again_and_read_on(desk: Desk) -> None:
    desk.stack.redis.delete(desk.stack.keys.groups("s"))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while not desk.stack.redis.exists(desk.stack.keys.groups("s")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    wanted = desk.add(2)
    await until(lambda: desk.got == wanted)


@within(20)
async def test_several_groups_are_read_at_once_only_where_they_end_at_once(stack: Stack) -> None:
    """A queue of rollouts that take their time is shared evenly among replicas, one by one."""
    desk = Desk(stack, slots=100)
    await stack.reading("s", desk.identity.consumer)
    reads_before = reads(stack)
    for seconds in (SHORT_GROUP_S * 2, 60.0):
        desk.reader.group_ended(seconds)
    wanted = desk.add(10)
    await until(lambda: desk.got == wanted)
    one_by_one = reads(stack) - reads_before
    await desk.close()
    stack.redis.delete(stack.keys.groups("s"))

    swift = Desk(stack, slots=100)
    for _ in range(MOST_AT_ONCE):
        swift.reader.group_ended(0.0)
    wanted = swift.add(MOST_AT_ONCE)
    reads_before = reads(stack)
    await until(lambda: swift.got == wanted)
    assert reads(stack) - reads_before < one_by_one
    await swift.close()
    stack.redis.delete(stack.keys.groups("s"))


def reads(stack: Stack) -> int:
    return int(stack.redis.info("commandstats")["cmdstat_xreadgroup"]["calls"])


@within(20)
async def test_a_reader_that_waits_takes_one_however_short_the_groups_before_were(stack: Stack) -> None:
    """Two idle replicas waited; the one that had read sixteen instant groups at once took all of the next batch."""
    desk = Desk(stack, slots=100)
    for _ in range(MOST_AT_ONCE):
        desk.reader.group_ended(0.0)
    await stack.reading("s", desk.identity.consumer)
    await until(lambda: stack.redis.info("clients")["blocked_clients"] > 0)
    reads_before = reads(stack)
    with stack.redis.pipeline(transaction=True) as together:
        for at in range(3):
            together.xadd(stack.keys.groups("s"), {"n": at})
        wanted = [entry.decode() for entry in together.execute()]
    await until(lambda: desk.got == wanted)
    assert reads(stack) - reads_before >= len(wanted) - 1
    await desk.close()
    stack.redis.delete(stack.keys.groups("s"))

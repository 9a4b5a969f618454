"""Reading groups on a real server: one at a time while a slot is free, stopped without losing a delivered one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from rolloutbus.broker.channel import Channel, Link
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.worker_transitions import Identity, WorkerTransitions
from rolloutbus.shard_workers import reading
from rolloutbus.shard_workers.reading import (
    MOST_AT_ONCE,
    MOST_LARGE_AT_ONCE,
    RESULTS_AT_ONCE,
    SHORT_GROUP_S,
    GroupReader,
)
from rolloutbus.shard_workers.slots import Slots

from tests.stacks import Stack, until, within


class Desk:
    """A reader of shard `s`, and what it delivered."""

    def __init__(self, stack: Stack, slots: int, name: str = "i", group_bytes: float = 0.0) -> None:
        self.stack = stack
        self.identity = Identity("s", "s", name)
        self.link = Link(stack.settings, "control", load_scripts)
        self.transitions = WorkerTransitions(self.link, stack.keys, stack.settings, self.identity)
        self.reader = GroupReader(stack.settings, self.link, self.transitions, "reader", lambda: group_bytes)
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
async def test_rollouts_that_take_their_time_are_read_one_by_one(desk: Desk) -> None:
    """So that a queue of them is shared evenly among replicas."""
    for seconds in (SHORT_GROUP_S * 2, 60.0):
        desk.reader.group_ended(seconds)
    assert await reads_of(desk, 10) >= 10


@pytest.mark.parametrize("group_bytes", [0.0, RESULTS_AT_ONCE / MOST_AT_ONCE], ids=["tiny", "small"])
@within(20)
async def test_groups_that_end_at_once_are_read_many_at_a_time(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, group_bytes: float
) -> None:
    monkeypatch.setattr(reading, "SHORT_GROUP_S", 60.0)
    assert await reads_of_swift(stack, group_bytes) <= 12


@within(20)
async def test_of_groups_with_large_results_only_few_are_read_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SHORT_GROUP_S", 60.0)
    assert await reads_of_swift(stack, RESULTS_AT_ONCE) >= 2 * MOST_AT_ONCE / MOST_LARGE_AT_ONCE


@within(20)
async def test_short_groups_of_a_while_ago_say_nothing_about_the_next(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that had read instant groups must not take most of the next batch of long ones."""
    monkeypatch.setattr(reading, "SHORT_GROUP_S", 0.001)
    assert await reads_of_swift(stack, 0.0, pause_s=0.05) >= 2 * MOST_AT_ONCE


@within(20)
async def test_whoever_is_alone_at_a_shard_reads_as_many_short_groups_as_there_are(stack: Stack) -> None:
    assert await reads_of_swift(stack, 0.0, replicas=1, ended=1) <= 4


@within(20)
async def test_of_several_replicas_each_reads_half_of_its_part_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SHORT_GROUP_S", 60.0)
    first = await reads_of_swift(stack, 0.0, replicas=2, waiting=2 * 2 * MOST_AT_ONCE)
    of_many = await reads_of_swift(stack, 0.0, replicas=20, waiting=2 * 2 * MOST_AT_ONCE)
    assert first <= 5 < of_many


async def reads_of(desk: Desk, groups: int) -> int:
    """How many reads it takes until these groups, added in one moment, are all here."""
    reads_before = reads(desk.stack)
    with desk.stack.redis.pipeline(transaction=True) as together:
        for at in range(groups):
            together.xadd(desk.stack.keys.groups("s"), {"n": at})
        wanted = [entry.decode() for entry in together.execute()]
    await until(lambda: desk.got[-groups:] == wanted)
    return reads(desk.stack) - reads_before


async def reads_of_swift(
    stack: Stack,
    group_bytes: float,
    pause_s: float = 0.0,
    replicas: int = 2,
    waiting: int = 0,
    ended: int = MOST_AT_ONCE,
) -> int:
    """The same for 64 groups, by a reader whose last groups ended at once, `pause_s` ago."""
    swift = Desk(stack, slots=100, group_bytes=group_bytes)
    swift.reader.replicas, swift.reader.waiting = replicas, waiting
    await stack.reading("s", swift.identity.consumer)
    for _ in range(ended):
        swift.reader.group_ended(0.0)
    await asyncio.sleep(pause_s)
    found = await reads_of(swift, 2 * MOST_AT_ONCE)
    await swift.close()
    stack.redis.delete(stack.keys.groups("s"))
    return found


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


@within(10)
async def test_an_interrupt_that_meets_a_lost_connection_is_no_error(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader had begun to connect anew meanwhile, and the worker ended over it."""

    async def lost_meanwhile() -> Channel:
        reader: Any = desk.reader
        if reader._channel is not None:
            reader._channel.abort()
            reader._channel = None
        return await Link.channel(desk.link)

    monkeypatch.setattr(desk.link, "channel", lost_meanwhile)
    await desk.reader.interrupt()
    monkeypatch.undo()
    entries = desk.add(2)
    await until(lambda: desk.got == entries)

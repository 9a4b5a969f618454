"""What happens to entries and connections: reconnect storms, lost replies, deleted entries, and streams that only
grow.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.channel import Link
from rolloutbus.broker.messages import ForeignEntryError
from rolloutbus.collector import GroupFailure

from tests.regressions.arena import Arena, Environment, arena_on, comes_true, completed, proxy_to, rows_of


async def test_fifty_clients_that_reconnect_at_once_settle(arena: Arena) -> None:
    """After a failover every client reconnected in the same millisecond, timed out together, and tried again
    together, for twenty minutes. Waiting grows with each failure and is never the same for two clients.
    """
    links = [Link(arena.settings, f"storm-{at}") for at in range(50)]
    try:
        await asyncio.gather(*(link.run([("PING",)]) for link in links))
        await asyncio.to_thread(arena.broker.kill)
        waiting = [asyncio.create_task(link.run([("PING",)])) for link in links]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(arena.broker.restart)
        async with asyncio.timeout(5):
            replies = await asyncio.gather(*waiting)
        assert all(reply == [b"PONG"] for reply in replies)
    finally:
        for link in links:
            await link.close()


async def test_a_group_whose_delivery_nobody_saw_is_found_again(tmp_path: Path) -> None:
    """A consumer's read was cancelled while its reply was under way. The message was then pending for a consumer that
    had never seen it, and since that consumer was alive and well nobody ever claimed it. After every reconnect the
    own pending list comes first, so nobody has to wait for a lease to run out.
    """
    environment = Environment()
    async with arena_on(tmp_path, lease_s=60.0, block_s=5.0) as arena, proxy_to(arena) as proxy, asyncio.timeout(20):
        arena.worker("s/0", environment, url=proxy.url)
        async with arena.client() as client:
            await comes_true(lambda: _blocked_readers(arena))
            proxy.misbehave("silent")
            async with client.run_groups(rows_of(1, 2), 2) as batch:
                await comes_true(lambda: _pending(arena))
                assert environment.groups == [], "it was delivered, and the reply never came"
                proxy.misbehave("reset")
                proxy.heal()
                groups = [group async for group in batch]
        await arena.end()
    assert len(groups) == 1
    assert len(environment.groups) == 1


def _blocked_readers(arena: Arena) -> int:
    clients = arena.control.client_list()
    return sum(client["name"].startswith("rolloutbus:reader") and "b" in client["flags"] for client in clients)


def _pending(arena: Arena) -> int:
    return arena.control.xpending(arena.keys.groups("s"), "workers")["pending"]


async def test_a_group_whose_entry_was_deleted_by_hand_is_reported(arena: Arena) -> None:
    """Somebody cleaned a stream up with XTRIM while jobs were on it. The trainer waited for three groups that no
    worker would ever see. Entries of groups that are out are looked for, and a missing one is the group's failure.
    """
    async with arena.client() as client, client.run_groups(rows_of(4, 2), 2, on_failure="yield") as batch:
        stream = arena.keys.groups("s")
        await comes_true(lambda: arena.control.xlen(stream) == 4)
        gone, fields = arena.control.xrange(stream, count=1)[0]
        arena.control.xdel(stream, gone)
        arena.worker("s/0", Environment())
        async with asyncio.timeout(15):
            groups = [group async for group in batch]
    failed = [group for group in groups if isinstance(group, GroupFailure)]
    assert [(failure.group_index, failure.type) for failure in failed] == [(int(fields[b"group"]), "EntryDeletedError")]
    assert len(groups) == 4


async def test_a_record_that_was_changed_by_hand_ends_its_batch_by_name(arena: Arena) -> None:
    """Nobody could read it, so nobody looked after the batch any more, and it waited for what would never come."""
    async with arena.client() as client, client.run_groups(rows_of(4, 2), 2) as batch:
        await comes_true(lambda: arena.control.xlen(arena.keys.groups("s")) == 4)
        arena.control.hset(arena.keys.batch(batch.id), "g:2", "whatever")
        with pytest.raises(ForeignEntryError, match="record of group 2"):
            async with asyncio.timeout(15):
                await anext(batch)


async def test_after_ten_thousand_rows_the_streams_are_empty_and_small(arena: Arena) -> None:
    """Acknowledged messages stayed on the stream; after a week the broker was at its memory limit with nothing to do.
    An entry goes with its acknowledgement, and what a batch needed goes with the batch.
    """
    arena.worker("s/0", Environment())
    async with arena.client() as client:
        async with client.run_groups(rows_of(1_250, 8), 8) as batch:
            count = sum(len(group.results) for group in await completed(batch))
        streams: dict[bytes, Any] = {
            key: (arena.control.xlen(key), arena.control.memory_usage(key))
            for key in arena.control.scan_iter("*", _type="STREAM")
            if not key.endswith((b":events", b":dead"))
        }
        assert count == 10_000
        assert len(streams) == 2
        assert all(length == 0 and size < 16_384 for length, size in streams.values()), streams
        assert arena.control.xlen(arena.keys.events) < 25_000
        assert not list(arena.control.scan_iter("*batch:*"))


async def test_a_broker_that_takes_no_writes_for_a_while_ends_nothing(arena: Arena) -> None:
    """The only replica was restarted, another time a snapshot failed on a full disk: for some seconds the server
    refused every write. Each worker and the trainer's client ended with that refusal, in the middle of a batch.
    """

    async def slow(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"row": row["_rowidx"]}

    workers = [arena.worker(f"s/{at}", Environment(slow)) for at in range(2)]
    async with arena.client() as client, client.run_groups(rows_of(60, 1), 1) as batch:
        await anext(batch)
        arena.control.config_set("min-replicas-to-write", 1)
        await asyncio.sleep(2 * arena.settings.lease_s)
        arena.control.config_set("min-replicas-to-write", 0)
        assert len(await completed(batch)) == 59
    assert not [worker for worker, task in workers if task.done()]

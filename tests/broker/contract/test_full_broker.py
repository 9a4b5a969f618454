"""At maxmemory: what adds is refused, what frees or finishes goes on. fakeredis has no memory limit, so only real
servers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from rolloutbus.broker.channel import Link, Payload
from rolloutbus.broker.client_transitions import BatchSpec, cancel_batch
from rolloutbus.broker.errors import BrokerFullError, RolloutBusError
from rolloutbus.broker.messages import unframe
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.worker_transitions import Rows

from tests.broker.contract.stage import FAILURE, SHARD, SIZE, Stage, result_rows


class Memory:
    """Lets a server believe that its memory is used up."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def fill(self) -> None:
        await self._stage.raw("CONFIG", "SET", "maxmemory", "1")

    async def free(self) -> None:
        await self._stage.raw("CONFIG", "SET", "maxmemory", "0")


@pytest.fixture
async def memory(real_stage: Stage) -> AsyncIterator[Memory]:
    memory = Memory(real_stage)
    yield memory
    await memory.free()


async def test_a_group_is_refused_as_a_whole_and_accepted_once_there_is_room(real_stage: Stage, memory: Memory):
    batch = await real_stage.opened(1)
    await memory.fill()
    (answer,) = await batch.client.publish(batch.groups)
    assert isinstance(answer, BrokerFullError)
    assert "maxmemory" in str(answer)
    assert await real_stage.queued() == []
    assert await real_stage.count(batch, "published") == 0
    await memory.free()
    assert (await real_stage.published(batch))[0].status == "ok"


async def test_a_batch_is_not_opened_and_leaves_no_key(real_stage: Stage, memory: Memory):
    client = real_stage.client()
    await client.own()
    await memory.fill()
    with pytest.raises(BrokerFullError):
        await client.open(BatchSpec("too-much", 1, SIZE, SIZE, (SHARD,)))
    assert await real_stage.key_names() == {"owner:trainer"}


async def test_results_go_the_slower_way_and_arrive_whole(real_stage: Stage, memory: Memory):
    batch = await real_stage.sealed()
    worker = real_stage.worker()
    attempt = await real_stage.taken(worker)
    large = Payload.of([b"\x00\xff" * 20_000, memoryview(bytes(range(256)) * 100)])
    await memory.fill()
    assert (await real_stage.accept(worker, attempt, result_rows(0), Rows((1,), large))).status == "ok"
    again = await real_stage.accept(worker, attempt, result_rows(0))
    assert (again.status, again.seen) == ("duplicate", {0, 1})
    assert (await real_stage.accept(worker, attempt, result_rows(2), finish=True)).status == "incomplete"
    assert (await real_stage.accept(worker, attempt, result_rows(2, 3), finish=True)).status == "ok"
    assert (await real_stage.accept(worker, attempt, result_rows(2, 3), finish=True)).status == "repeated"
    found = await real_stage.results()
    assert [entry.row_indices for entry in found] == [(0,), (1,), (2, 3)]
    assert found[1].payload == large.joined()
    assert len(unframe(found[2].payload)) == 2
    assert (await real_stage.record(batch))["status"] == "done"
    assert await real_stage.queued() == []


async def test_workers_go_on(real_stage: Stage, memory: Memory):
    batch = await real_stage.sealed(4)
    first, second = real_stage.worker("math/0"), real_stage.worker("math/1")
    await memory.fill()
    await first.prepare()
    await first.register()
    failed, dead, released, lost = [await real_stage.taken(first) for _ in range(4)]
    assert await first.fail(failed, FAILURE, limit=5, delay_s=60) == "retry"
    assert await first.fail(dead, FAILURE, limit=1, delay_s=0) == "dead"
    assert await first.release(released) == "ok"
    assert (await real_stage.taken(second, await real_stage.claimed(second))).number == 2
    assert (await real_stage.taken_over(lost, second)).number == 2
    await first.set_aside(failed.group.entry, "strange")
    await first.leave()
    assert await real_stage.count(batch, "failed") == 1


async def test_clients_go_on(real_stage: Stage, memory: Memory):
    batch, cancelled, expired = await real_stage.sealed(2), await real_stage.sealed(1), await real_stage.sealed(1)
    unsealed = await real_stage.opened(0)
    worker = real_stage.worker()
    await real_stage.finish(worker, await real_stage.taken(worker))
    await memory.fill()
    client = batch.client
    assert await client.own() == 0
    assert await client.seal(unsealed.id) == "ok"
    await client.adopt(unsealed.id)
    (entry,) = await real_stage.results()
    assert await client.handed(batch.id, SHARD, [0], {entry.entry: len(entry.payload)}) == "ok"
    assert await client.expire(SHARD, expired.groups[0], expired.entries[0], "no_instance", 1, FAILURE) == "dead"
    assert await cancel_batch(real_stage.runner, real_stage.keys, cancelled.id, "trainer", [SHARD], "why") == 1
    books = await batch.close()
    assert books is not None
    assert (books.completed, books.cancelled) == (1, 1)
    await client.resign([SHARD])
    assert "owner:trainer" not in await real_stage.key_names()
    await client.own()


async def test_a_worker_that_reconnects_goes_on(real_stage: Stage, memory: Memory):
    await real_stage.sealed()
    await memory.fill()
    assert isinstance(real_stage.runner, Link)
    link = Link(real_stage.runner.settings, "again", load_scripts)
    try:
        other = Stage(link, real_stage.keys.run)
        worker = other.worker()
        await worker.prepare()
        assert (await other.finish(worker, await other.taken(worker))).status == "ok"
    finally:
        await link.close()


async def test_a_worker_begins_also_where_its_stream_does_not_exist_yet(real_stage: Stage, memory: Memory):
    """It ended at once, and its fleet with it, over a key of a few bytes."""
    await memory.fill()
    await real_stage.worker().prepare()
    await real_stage.worker().prepare()
    assert await real_stage.queued() == []
    assert await real_stage.raw("XINFO", "GROUPS", real_stage.stream)


async def test_one_group_that_fits_no_more_does_not_undo_the_others(real_stage: Stage, memory: Memory):
    batch = await real_stage.opened(2)
    await real_stage.published(batch, 0)
    await memory.fill()
    answers = await batch.client.publish(batch.groups)
    assert all(isinstance(answer, RolloutBusError) for answer in answers)
    assert await real_stage.queued() == [batch.entries[0]]

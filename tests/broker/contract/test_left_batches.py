"""A batch whose process died, and another process under its client's name: until that resumes it, nobody has it."""

from __future__ import annotations

import pytest
from rolloutbus.broker.client_transitions import ClientTransitions
from rolloutbus.broker.messages import GroupEntry
from rolloutbus.broker.worker_transitions import Taken, WorkerTransitions

from .stage import Batch, Stage


async def taken(worker: WorkerTransitions, group: GroupEntry, token: str = "t") -> Taken:
    return await worker.take(group, token, observing=True, crash_limit=5)


async def left(stage: Stage, batch: Batch) -> ClientTransitions:
    """The client's next process has its name, and goes on without this batch."""
    await stage.owner_absent(stage.settings.lease_s + 1, batch.client)
    heir = stage.client(incarnation="second")
    assert await heir.own() == 0
    return heir


async def left_for_long(stage: Stage, batch: Batch) -> None:
    """As if somebody had seen that before `abandon_after_s`."""
    key = stage.keys.batch(batch.id)
    owner, since = (await stage.raw("HGET", key, "left")).decode().split()
    await stage.raw("HSET", key, "left", f"{owner} {int(since) - stage.settings.abandon_ms - 1}")


async def forgotten(stage: Stage, batch: Batch) -> None:
    """So that the stage can close it."""
    stage.batches.remove(batch)
    await stage.raw("DEL", stage.keys.batch(batch.id), stage.keys.accepted(batch.id))


async def test_what_a_dead_process_left_is_dropped_though_its_name_is_in_use_again(stage: Stage):
    """All of it was run for nobody, and its results stayed on the stream of the process that came after it."""
    batch, worker = await stage.sealed(3), stage.worker()
    running = await stage.taken(worker)
    await left(stage, batch)
    assert (await taken(worker, await stage.delivered(worker))).status == "parked"
    assert await stage.renew(worker, running) == ["ok"]
    assert (await worker.claim(10, observing=True, peers=())).entries == []
    await left_for_long(stage, batch)
    assert await stage.renew(worker, running) == ["gone"]
    assert (await taken(worker, await stage.claimed(worker))).status == "gone"
    assert (await taken(worker, await stage.delivered(worker))).status == "gone"
    assert await stage.count(batch, "cancelled") == 3
    assert await stage.queued() == []
    await forgotten(stage, batch)


async def test_a_process_that_resumes_the_batch_has_it_again(stage: Stage):
    batch, worker = await stage.sealed(2), stage.worker()
    attempt = await stage.taken(worker)
    heir = await left(stage, batch)
    assert (await taken(worker, await stage.delivered(worker))).status == "parked"
    await left_for_long(stage, batch)
    await heir.adopt(batch.id)
    assert await stage.renew(worker, attempt) == ["ok"]
    assert (await taken(worker, await stage.claimed(worker))).status == "ok"
    batch.client = heir


async def test_each_process_that_leaves_a_batch_is_waited_for_anew(stage: Stage):
    batch, worker = await stage.sealed(), stage.worker()
    attempt = await stage.taken(worker)
    heir = await left(stage, batch)
    assert await stage.renew(worker, attempt) == ["ok"]
    await left_for_long(stage, batch)
    await heir.adopt(batch.id)
    batch.client = heir
    await stage.owner_absent(stage.settings.lease_s + 1, heir)
    batch.client = stage.client(incarnation="third")
    assert await batch.client.own() == 0
    assert await stage.renew(worker, attempt) == ["ok"]
    await batch.client.adopt(batch.id)


@pytest.mark.parametrize("owner", ["", None])
async def test_a_batch_whose_record_names_no_owner_is_nobodys(stage: Stage, owner: str | None):
    batch, worker = await stage.sealed(), stage.worker()
    key = stage.keys.batch(batch.id)
    await (stage.raw("HDEL", key, "owner") if owner is None else stage.raw("HSET", key, "owner", owner))
    assert (await taken(worker, await stage.delivered(worker))).status == "parked"
    await forgotten(stage, batch)
    await stage.raw("DEL", stage.stream, stage.keys.parked("math"))

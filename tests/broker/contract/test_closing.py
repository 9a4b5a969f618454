"""own, resign, adopt, handed, close, cancel: one owner per name, and nothing left when a batch is over."""

from __future__ import annotations

import pytest
from rolloutbus.broker.channel import Payload
from rolloutbus.broker.client_transitions import BatchSpec, Books, OutgoingGroup, cancel_batch
from rolloutbus.broker.errors import BatchCancelledError, OwnershipLostError, UnknownBatchError, UsageError

from tests.broker.contract.stage import FAILURE, SHARD, SIZE, Stage, result_rows

# Owners


async def test_a_second_process_is_refused_while_the_lease_lives(stage: Stage):
    first, second = stage.client(incarnation="first"), stage.client(incarnation="second")
    assert await first.own() == 0
    left = await second.own()
    assert 0 < left <= stage.settings.lease_ms
    assert await first.own() == 0


async def test_a_lapsed_lease_can_be_taken_and_its_former_holder_is_refused(stage: Stage):
    first, second = stage.client(incarnation="first"), stage.client(incarnation="second")
    await first.own()
    await stage.owner_absent(stage.settings.lease_s + 1, first)
    assert await second.own() == 0
    assert await first.own() > 0


async def test_after_a_brokers_restart_the_holder_has_one_lease_to_come_back(stage: Stage):
    first, second = stage.client(incarnation="first"), stage.client(incarnation="second")
    await first.own()
    await stage.owner_absent(stage.settings.lease_s + 1, first)
    left = await second.own(watched_s=stage.settings.lease_s / 2)
    assert left == stage.settings.lease_ms / 2
    assert await first.own(watched_s=0) == 0


async def test_clients_of_different_names_do_not_disturb_each_other(stage: Stage):
    assert await stage.client("trainer").own() == 0
    assert await stage.client("validation", "second").own() == 0


async def test_whoever_resigns_frees_the_name_and_removes_his_streams(stage: Stage):
    batch = await stage.sealed(0)
    await batch.close()
    await stage.client(incarnation="second").resign([SHARD])
    assert {"owner:trainer", f"results:trainer:{SHARD}"} <= await stage.key_names()
    await batch.client.resign([SHARD])
    assert not {"owner:trainer", f"results:trainer:{SHARD}"} & await stage.key_names()
    assert await stage.client(incarnation="second").own() == 0


async def test_a_sealed_batch_is_adopted_by_the_clients_next_process(stage: Stage):
    batch = await stage.sealed()
    await stage.owner_absent(stage.settings.lease_s + 1, batch.client)
    heir = stage.client(incarnation="second")
    with pytest.raises(OwnershipLostError):
        await heir.adopt(batch.id)
    await heir.own()
    await heir.adopt(batch.id)
    with pytest.raises(OwnershipLostError):
        await batch.client.close(batch.id, batch.queued())
    batch.client = heir
    assert (await batch.close()) is not None


async def test_an_unsealed_batch_cannot_be_adopted(stage: Stage):
    batch = await stage.opened(1)
    with pytest.raises(UnknownBatchError, match="never sealed"):
        await batch.client.adopt(batch.id)


async def test_neither_a_foreign_nor_an_unknown_nor_a_cancelled_batch_is_adopted(stage: Stage):
    batch = await stage.sealed()
    other = stage.client("validation", "second")
    await other.own()
    with pytest.raises(UsageError, match="belongs to client 'trainer', and this client is 'validation'"):
        await other.adopt(batch.id)
    with pytest.raises(UnknownBatchError):
        await other.adopt("unheard-of")
    await cancel_batch(stage.runner, stage.keys, batch.id, "trainer", [SHARD], "why not")
    with pytest.raises(BatchCancelledError):
        await batch.client.adopt(batch.id)


@pytest.mark.parametrize("cancelled", [True, False])
async def test_the_end_of_a_batch_takes_nothing_of_another_whose_entry_has_the_same_id(stage: Stage, cancelled: bool):
    """An id is unique on its own stream only. A group of another batch on another shard, published in the same
    millisecond, went with it, and was told as deleted by somebody.
    """
    client, words = stage.client(), stage.keys.groups("words")
    assert await client.own() == 0
    spec = BatchSpec("both", 2, 2 * SIZE, SIZE, (SHARD, "words"), f'[["{SHARD}","adds",1],["words","adds",1]]')
    assert await client.open(spec) == "ok"
    await client.publish([OutgoingGroup("both", 0, SHARD, "adds", SIZE, 0, Payload.of([b"rows of a group"]))])
    entry = (await stage.taken(stage.worker())).group.entry
    await stage.raw("XADD", words, entry, "kind", "group", "batch", "another")
    if cancelled:
        await cancel_batch(stage.runner, stage.keys, "both", "trainer", [SHARD, "words"], "why not")
    assert await client.close("both", {SHARD: [], "words": []}) is not None
    assert await stage.queued() == []
    assert [found for found, _ in await stage.raw("XRANGE", words, "-", "+")] == [entry.encode()]


@pytest.mark.parametrize("layout", ["", "{", "5", "[5]", '[["nowhere","adds",2]]', '[["math","adds",1e9]]', "[[]]"])
async def test_a_batch_whose_layout_somebody_changed_can_still_be_ended(stage: Stage, layout: str):
    client = stage.client()
    assert await client.own() == 0
    spec = BatchSpec("both", 2, 2 * SIZE, SIZE, (SHARD, "words"), f'[["{SHARD}","adds",1],["words","adds",1]]')
    assert await client.open(spec) == "ok"
    await client.publish([OutgoingGroup("both", 0, SHARD, "adds", SIZE, 0, Payload.of([b"rows of a group"]))])
    worker = stage.worker()
    group = (await stage.taken(worker)).group
    await stage.raw("HSET", stage.keys.batch("both"), "layout", layout)
    books = await client.close("both", {SHARD: [], "words": []})
    assert books is not None
    assert books.cancelled == 1
    # Whoever has it, or takes it over, drops it.
    assert (await worker.take(group, "t", observing=True, crash_limit=5)).status in ("gone", "stale")
    assert await stage.queued() == []


# Handed


async def test_what_was_handed_over_is_deleted_and_its_bytes_are_counted_once(stage: Stage):
    batch = await stage.sealed(2)
    worker = stage.worker()
    for _ in range(2):
        await stage.finish(worker, await stage.taken(worker))
    first, second = await stage.results()
    size = len(first.payload)
    for _ in range(2):
        assert await batch.client.handed(batch.id, SHARD, [0], {first.entry: size}) == "ok"
        assert await stage.count(batch, "unread_bytes") == len(second.payload)
    assert [entry.entry for entry in await stage.results()] == [second.entry]
    assert [(await stage.record(batch, group))["status"] for group in range(2)] == ["handed", "done"]


async def test_a_process_that_lost_its_name_acknowledges_nothing(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    (entry,) = await stage.results()
    loser = stage.client(incarnation="second")
    assert await loser.handed(batch.id, SHARD, [0], {entry.entry: 1}) == "not-owner"
    assert await stage.results() == [entry]
    assert (await stage.record(batch))["status"] == "done"


async def test_left_over_results_of_a_closed_batch_can_be_deleted(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    (entry,) = await stage.results()
    await batch.close()
    assert await batch.client.handed(batch.id, SHARD, [], {entry.entry: 0}) == "gone"
    assert await stage.results() == []
    assert f"batch:{batch.id}" not in await stage.key_names()


# Close


async def test_closing_drops_what_is_queued_running_delayed_and_parked_and_balances_the_books(stage: Stage):
    batch, bystander = await stage.sealed(7), await stage.sealed(1)
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    await worker.fail(await stage.taken(worker), FAILURE, limit=1, delay_s=0)
    running, delayed = await stage.taken(worker), await stage.taken(worker)
    await worker.fail(delayed, FAILURE, limit=5, delay_s=60)
    await worker.release(await stage.taken(worker))
    await stage.raw("HSET", stage.keys.batch(batch.id), "unread_bytes", 1 << 40)
    parked = await stage.delivered(worker)
    assert (await worker.take(parked, "t", observing=True, crash_limit=5)).status == "parked"
    books = await batch.close()
    assert books == Books(7, 1, 1, 5, retries=1, dead_groups=1)
    assert await stage.queued() == list(bystander.entries.values())
    assert await stage.pending() == 0
    left = await stage.key_names()
    assert left == {
        "dead",
        "events",
        "owner:trainer",
        f"batch:{bystander.id}",
        f"groups:{SHARD}",
        f"results:trainer:{SHARD}",
    }
    assert running.group.entry not in await stage.queued()


async def test_what_was_taken_once_is_dropped_though_the_client_knows_no_entry(stage: Stage):
    batch = await stage.sealed(2)
    worker = stage.worker()
    await stage.taken(worker)
    await worker.fail(await stage.taken(worker), FAILURE, limit=5, delay_s=60)
    await batch.client.close(batch.id, {SHARD: []})
    assert await stage.queued() == []
    assert await stage.pending() == 0


async def test_what_comes_late_to_a_closed_batch_is_gone_and_creates_no_key(stage: Stage):
    batch = await stage.sealed(3)
    worker = stage.worker()
    attempts = [await stage.taken(worker) for _ in range(3)]
    group = attempts[0].group
    await batch.close()
    await worker.register()
    before = await stage.key_names()
    assert (await stage.accept(worker, attempts[0], result_rows(0))).status == "gone"
    assert (await stage.finish(worker, attempts[0])).status == "gone"
    assert await stage.renew(worker, attempts[0]) == ["gone"]
    assert await worker.fail(attempts[1], FAILURE, limit=5, delay_s=0) == "gone"
    assert await worker.fail(attempts[1], FAILURE, limit=1, delay_s=0) == "gone"
    assert await worker.release(attempts[2]) == "gone"
    assert (await worker.take(group, "t", observing=True, crash_limit=5)).status in ("gone", "stale")
    with pytest.raises(BatchCancelledError):
        await batch.client.seal(batch.id)
    assert await batch.client.handed(batch.id, SHARD, [0], {"1-1": 5}) == "gone"
    assert await stage.key_names() == before
    assert await stage.results() == []


async def test_closing_again_finds_nothing(stage: Stage):
    batch = await stage.sealed()
    assert await batch.close() is not None
    assert await batch.close() is None


async def test_only_the_owner_closes(stage: Stage):
    batch = await stage.sealed()
    with pytest.raises(OwnershipLostError):
        await stage.client(incarnation="second").close(batch.id, batch.queued())
    assert await stage.queued() == list(batch.entries.values())


async def test_a_batch_whose_stream_somebody_replaced_can_still_be_closed(stage: Stage):
    batch = await stage.sealed()
    await stage.raw("DEL", stage.stream)
    await stage.raw("SET", stage.stream, "something else")
    books = await batch.close()
    assert books is not None
    assert books.cancelled == 1
    await stage.raw("DEL", stage.stream)


async def test_the_same_rows_are_accepted_in_the_next_batch(stage: Stage):
    worker = stage.worker()
    for _ in range(2):
        batch = await stage.sealed()
        assert (await stage.finish(worker, await stage.taken(worker))).status == "ok"
        books = await batch.close()
        assert books is not None
        assert books.completed == 1


# Cancel


async def test_an_operators_cancellation_ends_the_work_and_tells_the_client(stage: Stage):
    batch = await stage.sealed(4)
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    running = await stage.taken(worker)
    await worker.release(await stage.taken(worker))
    stopped = await cancel_batch(stage.runner, stage.keys, batch.id, "trainer", [SHARD], "wrong data")
    assert stopped == 3
    assert await stage.renew(worker, running) == ["gone"]
    assert (await stage.finish(worker, running)).status == "gone"
    assert await worker.fail(running, FAILURE, limit=5, delay_s=0) == "gone"
    assert await worker.release(running) == "gone"
    assert [(entry.kind, entry.payload) for entry in await stage.results()][1:] == [("cancelled", b"wrong data")]
    assert await stage.raw("ZCARD", stage.keys.delayed(SHARD)) == 0


async def test_a_cancelled_batch_is_closed_with_balanced_books_and_leaves_no_entry(stage: Stage):
    batch = await stage.sealed(3)
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    await cancel_batch(stage.runner, stage.keys, batch.id, "trainer", [SHARD], "why")
    assert await cancel_batch(stage.runner, stage.keys, batch.id, "trainer", [SHARD], "again") == 0
    books = await batch.close()
    assert books is not None
    assert (books.published, books.completed, books.cancelled) == (3, 1, 2)
    assert await stage.queued() == []


async def test_an_unknown_batch_cannot_be_cancelled(stage: Stage):
    with pytest.raises(UnknownBatchError, match="rolloutbus status"):
        await cancel_batch(stage.runner, stage.keys, "unheard-of", "trainer", [SHARD], "why")
    assert await stage.key_names() == set()

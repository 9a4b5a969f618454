"""open, publish, seal: each group is on the stream once, or not at all."""

from __future__ import annotations

import pytest
from rolloutbus.broker.client_transitions import BatchSpec
from rolloutbus.broker.errors import BatchCancelledError, OwnershipLostError

from tests.broker.contract.stage import SHARD, SIZE, Stage, result_rows


async def test_a_batch_can_be_opened_again_after_a_lost_reply(stage: Stage):
    batch = await stage.opened()
    assert await batch.client.open(BatchSpec(batch.id, 1, SIZE, SIZE, (SHARD,))) == "repeated"


async def test_what_was_unread_on_a_deleted_stream_takes_no_room_for_ever(stage: Stage):
    """Nobody can hand over what nobody can read, and a batch at its bound waited for that until its job was over."""
    batch = await stage.sealed(2, stage.client(max_unread_bytes=1))
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    await batch.client.forget_unread(batch.id, [SHARD])
    assert await stage.count(batch, "unread_bytes") > 0
    await stage.raw("DEL", stage.keys.results("trainer", SHARD))
    await stage.client(incarnation="second").forget_unread(batch.id, [SHARD])
    assert await stage.count(batch, "unread_bytes") > 0
    # Whoever makes the stream again: the client, or one of its other batches.
    assert await batch.client.make_results([SHARD]) == [SHARD]
    await batch.client.forget_unread("unknown", [SHARD])
    await batch.client.forget_unread(batch.id, [SHARD])
    taken = await worker.take(await stage.delivered(worker), "token", observing=True, crash_limit=5)
    assert taken.status == "ok"
    assert "batch:unknown" not in await stage.key_names()


async def test_only_the_owner_opens_a_batch(stage: Stage):
    await stage.client("trainer", "first").own()
    with pytest.raises(OwnershipLostError, match=r"trainer.*another process"):
        await stage.client("trainer", "second").open(BatchSpec("foreign", 1, SIZE, SIZE, (SHARD,)))
    assert not {name for name in await stage.key_names() if "foreign" in name or name.startswith("groups")}


async def test_a_results_stream_that_somebody_deleted_is_made_again_by_its_owner(stage: Stage):
    batch = await stage.sealed()
    assert await batch.client.make_results([SHARD]) == []
    await stage.raw("DEL", stage.keys.results("trainer", SHARD))
    assert await stage.client("trainer", "other").make_results([SHARD]) == []
    assert await batch.client.make_results([SHARD]) == [SHARD]
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    assert [entry.group for entry in await stage.results()] == [0]
    assert await stage.raw("PTTL", stage.keys.results("trainer", SHARD)) > 0


async def test_every_group_is_published_once(stage: Stage):
    batch = await stage.sealed(3)
    assert await stage.queued() == list(batch.entries.values())
    assert await stage.count(batch, "published") == 3


async def test_publishing_again_gives_no_second_entry(stage: Stage):
    batch = await stage.opened(2)
    first = await stage.published(batch)
    again = await batch.client.publish(batch.groups)
    assert [getattr(answer, "status", answer) for answer in again] == ["repeated", "repeated"]
    assert await stage.queued() == [getattr(answer, "entry", "") for answer in first]
    assert await stage.count(batch, "published") == 2


async def test_a_group_that_comes_twice_in_one_write_is_published_once(stage: Stage):
    batch = await stage.opened(1)
    answers = await stage.published(batch, 0, 0)
    assert [getattr(answer, "status", answer) for answer in answers] == ["ok", "repeated"]
    assert len(await stage.queued()) == 1


async def test_a_broker_that_lost_its_data_is_told_what_had_ended_and_believes_its_own_record_first(stage: Stage):
    """Whoever resumes the batch then finds each of its groups, and the books balance."""
    batch = await stage.opened(5)
    await stage.published(batch, 0)
    with pytest.raises(OwnershipLostError):
        await stage.client(incarnation="second").restore(batch.id, SIZE, {1: "handed"})
    for _ in range(2):
        await batch.client.restore(batch.id, SIZE, {0: "handed", 1: "handed", 2: "done", 3: "failed", 4: "told"})
    records = [await stage.record(batch, group) for group in range(5)]
    assert [(record["status"], record["token"]) for record in records] == [
        ("queued", "-"), ("handed", "-"), ("done", "-"), ("failed", "-"), ("failed", "told")
    ]  # fmt: skip
    await stage.raw("HDEL", stage.keys.batch(batch.id), "g:4")
    await batch.client.restore(batch.id, SIZE, {4: "told"})
    assert not await stage.record(batch, 4)
    assert await batch.client.seal(batch.id) == "ok"
    assert [await stage.count(batch, name) for name in ("published", "completed", "failed")] == [5, 2, 2]
    books = await batch.close()
    assert books is not None
    assert books.balanced


async def test_publishing_tells_how_many_bytes_are_queued(stage: Stage):
    batch = await stage.opened(2)
    size = batch.groups[0].payload.size
    answers = await stage.published(batch) + await stage.published(batch, 0)
    assert [getattr(answer, "queued_bytes", answer) for answer in answers] == [size, 2 * size, 2 * size]


async def test_a_process_that_lost_its_name_publishes_nothing(stage: Stage):
    batch = await stage.opened(1)
    (answer,) = await stage.client(incarnation="second").publish(batch.groups)
    assert isinstance(answer, OwnershipLostError)
    assert await stage.queued() == []


async def test_a_closed_batch_takes_no_group(stage: Stage):
    batch = await stage.opened(1)
    await batch.close()
    (answer,) = await batch.client.publish(batch.groups)
    assert isinstance(answer, BatchCancelledError)
    assert await stage.queued() == []


async def test_a_sealed_batch_takes_no_further_group(stage: Stage):
    batch = await stage.sealed(1)
    (answer,) = await batch.client.publish([batch.groups[0]._replace(group=1)])
    assert isinstance(answer, BatchCancelledError)
    assert await stage.queued() == list(batch.entries.values())


async def test_without_its_stream_nothing_is_published(stage: Stage):
    batch = await stage.opened(1)
    await stage.raw("DEL", stage.stream)
    (answer,) = await batch.client.publish(batch.groups)
    assert getattr(answer, "status", answer) == "no-stream"
    assert await stage.count(batch, "published") == 0
    assert f"groups:{SHARD}" not in await stage.key_names()


async def test_one_refused_group_does_not_harm_the_others_of_a_write(stage: Stage):
    good, closed = await stage.opened(1), await stage.opened(1)
    await closed.close()
    answers = await good.client.publish([closed.groups[0], good.groups[0]])
    assert isinstance(answers[0], BatchCancelledError)
    good.entries[0] = getattr(answers[1], "entry", "")
    assert await stage.queued() == [good.entries[0]]


async def test_a_batch_is_sealed_only_when_every_group_is_published(stage: Stage):
    batch = await stage.opened(2)
    await stage.published(batch, 0)
    assert await batch.client.seal(batch.id) == "unfinished"
    assert await stage.raw("HGET", stage.keys.batch(batch.id), "state") == b"open"
    await stage.published(batch, 1)
    assert await batch.client.seal(batch.id) == "ok"
    assert await batch.client.seal(batch.id) == "ok"


async def test_only_the_owner_seals(stage: Stage):
    batch = await stage.opened(0)
    with pytest.raises(OwnershipLostError):
        await stage.client(incarnation="second").seal(batch.id)


async def test_every_key_that_a_batch_creates_expires_by_itself(stage: Stage):
    batch = await stage.sealed(3)
    worker = stage.worker()
    await worker.prepare()
    await worker.register()
    await stage.accept(worker, await stage.taken(worker), result_rows(0))
    await worker.release(await stage.taken(worker))
    await stage.raw("HSET", stage.keys.batch(batch.id), "unread_bytes", 1 << 40)
    group = await stage.delivered(worker)
    assert (await worker.take(group, "token", observing=True, crash_limit=5)).status == "parked"
    names = await stage.key_names()
    kinds = {name.split(":")[0] for name in names}
    assert kinds == {"owner", "batch", "accepted", "groups", "results", "delayed", "parked", "instance", "events"}
    for name in names - {"events"}:
        assert 0 < await stage.raw("PTTL", stage.keys.prefix + name) <= stage.settings.key_ttl_ms, name


async def test_a_renewal_keeps_what_waits_beside_the_stream_alive(stage: Stage):
    await stage.sealed(1)
    worker = stage.worker()
    await worker.release(await stage.taken(worker))
    delayed = stage.keys.delayed(SHARD)
    await stage.raw("PEXPIRE", delayed, 5000)
    await stage.renew(worker)
    assert await stage.raw("PTTL", delayed) > 5000

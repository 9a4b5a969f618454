"""How many dead letters are kept, by number and by the memory they take; and what those of replayed groups tell."""

from __future__ import annotations

from rolloutbus.broker.channel import Payload
from rolloutbus.broker.dead_letters import read_dead_letters
from rolloutbus.broker.messages import ReplayOrigin

from tests.broker.contract.stage import FAILURE, SHARD, Batch, Stage

ROWS = 100_000


async def large(stage: Stage, groups: int) -> Batch:
    """A sealed batch whose groups hold ROWS bytes each."""
    batch = await stage.opened(groups)
    batch.groups = [group._replace(payload=Payload.of([bytes(ROWS)])) for group in batch.groups]
    await stage.published(batch)
    assert await batch.client.seal(batch.id) == "ok"
    return batch


async def kept(stage: Stage) -> list[bytes]:
    return [letter[b"group"] for letter in await stage.dead_letters()]


async def test_the_oldest_letters_go_where_all_of_them_would_take_too_much_memory(real_stage: Stage):
    """Fakeredis does not tell what a key takes."""
    await large(real_stage, 6)
    worker = real_stage.worker()
    worker.settings = worker.settings.model_copy(update={"max_dead_bytes": 3 * ROWS + ROWS // 2})
    for _ in range(6):
        assert await worker.fail(await real_stage.taken(worker), FAILURE, limit=1, delay_s=0) == "dead"
    assert await kept(real_stage) == [b"3", b"4", b"5"]


async def test_the_newest_letter_stays_whatever_it_takes(real_stage: Stage):
    """Also where the client ends the group, or a stranger's entry is set aside."""
    batch = await large(real_stage, 3)
    worker, client = real_stage.worker(), real_stage.client(max_dead_bytes=1)
    worker.settings = worker.settings.model_copy(update={"max_dead_bytes": 1})
    assert await worker.fail(await real_stage.taken(worker), FAILURE, limit=1, delay_s=0) == "dead"
    await worker.set_aside((await real_stage.delivered(worker)).entry, "strange")
    assert await kept(real_stage) == [b"1"]
    assert await client.expire(SHARD, batch.groups[2], batch.entries[2], "no_instance", 0, FAILURE) == "dead"
    assert await kept(real_stage) == [b"2"]


async def test_the_letter_of_a_replayed_group_tells_its_origin_whoever_buries_it(real_stage: Stage):
    """Fakeredis reads no letters, which is a read-only script."""
    origin = ReplayOrigin("first", 7, "trainer", 14, "5-1", 2)
    batch = await real_stage.opened(3)
    batch.groups = [group._replace(origin=origin) for group in batch.groups[:2]] + batch.groups[2:]
    await real_stage.published(batch)
    assert await batch.client.seal(batch.id) == "ok"
    worker = real_stage.worker()
    assert await worker.fail(await real_stage.taken(worker), FAILURE, limit=1, delay_s=0) == "dead"
    for group in (1, 2):
        ended = await batch.client.expire(SHARD, batch.groups[group], batch.entries[group], "no_instance", 0, FAILURE)
        assert ended == "dead"
    letters = await read_dead_letters(real_stage.runner, real_stage.keys)
    assert [letter.origin for letter in letters] == [origin, origin, None]
    assert letters[0].next_origin == ReplayOrigin("first", 7, "trainer", 14, "5-1", 3)
    assert letters[2].next_origin == ReplayOrigin(
        batch.id, 2, letters[2].client, letters[2].first_row, letters[2].entry, 1
    )

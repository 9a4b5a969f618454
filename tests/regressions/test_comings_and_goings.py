"""Trainers that leave and come back: in time, too late, or never; and what they leave behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.errors import GroupFailedError, UnknownBatchError
from rolloutbus.collector import GroupFailure

from tests.chaos.actors import Actor
from tests.regressions.arena import (
    RUN,
    SHARD,
    Arena,
    Environment,
    arena_on,
    comes_true,
    completed,
    echo,
    proxy_to,
    rows_of,
)


async def _slow(row: dict[str, Any]) -> dict[str, Any]:
    """Slow enough that its client counts as gone long before the batch is done."""
    await asyncio.sleep(0.05)
    return echo(row)


async def _killed_trainer(arena: Arena, folder: Path, environment: Environment, groups: int) -> str:
    """A trainer that is killed once it has logged a group of its sealed batch; returns the batch's id."""
    trainer = Actor("trainer_process", "trainer", arena.progress, folder)
    arena.actors.append(trainer)
    where = {"url": arena.broker.url, "run": RUN, "shards": [SHARD], "journal": str(folder / "journal")}
    batch = {"rows": rows_of(groups, 2), "size": 2, "client": "trainer", "by_row": False}
    await trainer.start({**where, "settings": arena.times, "kill_at": ["logged", 1], "delay_s": 0, "batches": [batch]})
    await arena.progress.until(lambda: bool(arena.progress.batches) or trainer.gone)
    (batch_id,) = arena.progress.batches
    # A worker that was there before could have the trainer killed in the middle of its publishing.
    await arena.sealed(batch_id)
    arena.worker("s/0", environment, slots=1)
    assert await trainer.wait(20)
    return batch_id


async def test_a_trainer_that_comes_back_too_late_for_some_groups_is_told_which(tmp_path: Path) -> None:
    """A trainer was restarted after a long maintenance. It resumed its batch, got what had been finished before it
    left, and then its books did not balance, with a message that asked for a bug report. Groups that were dropped
    because their client stayed away are failures that say so.
    """
    async with arena_on(tmp_path, abandon_after_s=1.0) as arena:
        batch = await _killed_trainer(arena, tmp_path, Environment(_slow), groups=30)
        await comes_true(lambda: int(arena.control.hget(arena.keys.batch(batch), "cancelled")))
        async with arena.client(name_wait_s=10.0) as client, await client.resume(batch, on_failure="yield") as back:
            groups = [group async for group in back]
    failures = [group for group in groups if isinstance(group, GroupFailure)]
    assert failures
    assert {failure.type for failure in failures} == {"AbandonedError"}
    assert back.counts.cancelled == 0
    assert back.counts.published == 30


async def test_a_trainer_that_comes_back_after_its_batch_is_gone_is_told_so(tmp_path: Path) -> None:
    """The other end of the same absence: the batch's keys had expired, and the resumed trainer waited for results
    that nobody held.
    """
    async with arena_on(tmp_path, abandon_after_s=1.0, key_ttl_s=2.0) as arena:
        batch = await _killed_trainer(arena, tmp_path, Environment(), groups=50)
        await comes_true(lambda: not arena.control.exists(arena.keys.batch(batch)))
        async with arena.client(name_wait_s=10.0) as client:
            with pytest.raises(UnknownBatchError, match=f"batch {batch} is not on the broker.*stayed away"):
                await client.resume(batch)


async def test_a_client_that_closed_leaves_its_name_free(arena: Arena) -> None:
    """The renewal of a lease was under way while its owner gave it up, arrived second, and took the lease for nobody;
    the next trainer waited half a minute for a process that had ended. Whoever gives a name up stops renewing it
    first.
    """
    arena.times |= {"renew_every_s": 0.001}
    for _ in range(40):
        async with arena.client():
            pass
        assert not arena.control.exists(arena.keys.owner("trainer"))


async def test_what_ended_a_client_is_what_its_batch_raises(arena: Arena) -> None:
    """A broker was switched off. The trainer's step ended with "the client was closed", which nobody had done, and
    the operator looked for a bug in the trainer. What ended the client is named, and is a `ConnectionError`, so that
    a retry around the step sees it.
    """
    arena.times |= {"reconnect_timeout_s": 0.5}
    client = arena.client()
    await client.__aenter__()
    batch = client.run_groups(rows_of(2, 2), 2)
    await asyncio.to_thread(arena.broker.kill)
    with pytest.raises(ConnectionError, match="no answer from unix://"):
        await anext(batch)
    with pytest.raises(ConnectionError, match="no answer from unix://"):
        await client.resume(batch.id)
    await client.close()


async def test_a_failed_group_raises_after_a_late_resume_too(tmp_path: Path) -> None:
    """Whoever did not ask for failures gets the first one raised, also when it is one of absence."""
    async with arena_on(tmp_path, abandon_after_s=1.0) as arena:
        batch = await _killed_trainer(arena, tmp_path, Environment(_slow), groups=30)
        await comes_true(lambda: int(arena.control.hget(arena.keys.batch(batch), "cancelled")))
        async with arena.client(name_wait_s=10.0) as client:
            with pytest.raises(GroupFailedError, match="abandon_after_s"):
                await completed(await client.resume(batch))


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_trainer_that_was_cut_off_too_long_is_told_which_groups_were_dropped(
    tmp_path: Path, restarted: bool
) -> None:
    """A switch was replaced, and a trainer saw its broker again after a quarter of an hour. Its workers had given it
    up, nothing on the broker knew of its groups, and it waited for them until the job's time was over. A client that
    comes back without having died is told like one that resumes. Where the broker was restarted meanwhile it brings
    back what that may have lost, and what had been dropped looked like a group of a cancelled batch.
    """
    async with (
        arena_on(tmp_path, persistence="always", tcp=True, abandon_after_s=1.0) as arena,
        proxy_to(arena) as proxy,
        asyncio.timeout(30),
        arena.client(proxy.url) as client,
        client.run_groups(rows_of(30, 2), 2, on_failure="yield") as batch,
    ):
        await arena.sealed(batch.id)
        arena.worker("s/0", Environment(_slow), slots=1)
        groups = [await anext(batch)]
        proxy.misbehave("reset")
        await comes_true(lambda: int(arena.control.hget(arena.keys.batch(batch.id), "cancelled")))
        if restarted:
            await asyncio.to_thread(arena.broker.kill)
            await asyncio.to_thread(arena.broker.restart)
        proxy.heal()
        groups += [group async for group in batch]
    failures = [group for group in groups if isinstance(group, GroupFailure)]
    assert failures
    assert {failure.type for failure in failures} == {"AbandonedError"}
    assert sorted(group.group_index for group in groups) == list(range(30))

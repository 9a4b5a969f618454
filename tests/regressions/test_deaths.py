"""Processes that die: agents, whole fleets, and groups that take their worker with them."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest
from rolloutbus.broker.errors import GroupFailedError
from rolloutbus.collector import CompletedGroup, GroupFailure

from tests.regressions.arena import Arena, arena_on, completed, rows_of

SLOTS = 4


async def test_a_batch_is_whole_after_an_agent_was_killed_in_its_middle(arena: Arena) -> None:
    """An agent process ran into the memory limit halfway through an epoch. Its queue object answered the trainer with
    nothing from then on, the trainer took nothing for "no rollouts this step", and trained on empty batches for
    hours. Here the dead agent's groups go to another one, and a batch has all of its rows or says which it has not.
    """
    await arena.process("s/0", kill_at=["start", 4])
    await arena.process("s/1")
    rows = rows_of(12, 4, ms=20)
    async with arena.client() as client, client.run_groups(rows, 4) as batch:
        groups = await completed(batch)
    assert arena.actors[0].code == -signal.SIGKILL
    assert sorted(result["row"] for group in groups for result in group.results) == list(range(48))
    assert batch.counts.completed == 12
    assert batch.metrics["timing/rollout/redeliveries"] >= 1


async def test_the_death_of_the_whole_fleet_ends_the_wait(tmp_path: Path) -> None:
    """Every environment worker died in one node failure. The trainer sat in `buffer.get()` until somebody looked the
    next morning, because an empty buffer looks the same as a slow one. The absence of instances is a fact the broker
    knows, so the wait ends after `no_instance_timeout_s`, and its error names the shard.
    """
    async with arena_on(tmp_path, no_instance_timeout_s=1.0) as arena:
        worker = await arena.process("s/0", kill_at=["start", 1])
        began = time.monotonic()
        async with arena.client() as client:
            with pytest.raises(GroupFailedError, match="no live instance of shard s"):
                await completed(client.run_groups(rows_of(3, 2), 2))
        assert worker.gone
        assert time.monotonic() - began < 10


async def test_what_the_last_instance_took_with_it_does_not_wait_for_its_deadline(tmp_path: Path) -> None:
    """Groups that nobody had taken ended after `no_instance_timeout_s`; those that the last instance was running when
    its node went kept the step waiting for their deadline, an hour.
    """
    async with arena_on(tmp_path, no_instance_timeout_s=1.0) as arena:
        await arena.process("s/0", kill_at=["start", 1], slots=3)
        async with arena.client() as client, asyncio.timeout(20):
            batch = client.run_groups(rows_of(3, 2), 2, on_failure="yield")
            assert [failure.type async for failure in batch if isinstance(failure, GroupFailure)] == [
                "NoInstanceError"
            ] * 3


async def test_groups_on_their_last_chance_follow_one_another_at_once(arena: Arena) -> None:
    """Eight groups were lost with their worker, and ran one at a time on the next, as they must; but each waited up to
    a second for somebody to look whether the one before had ended.
    """
    ends: list[float] = []
    async with arena.client() as client, client.run_groups(rows_of(8, 1, ms=20), 1) as batch:
        await arena.sealed(batch.id)
        await arena.process("s/0", kill_at=["start", 8], slots=8)
        await arena.progress.until(lambda: arena.actors[0].gone)
        await arena.process("s/1", slots=8, infra_attempts=2)
        async for _ in batch:
            ends.append(time.monotonic())
    assert batch.metrics["timing/rollout/redeliveries"] >= 6
    assert ends[-1] - ends[0] < 0.5 * (len(ends) - 1)


async def _keep_alive(arena: Arena, label: str) -> None:
    """What a fleet does: a dead instance is replaced under its label."""
    while True:
        actor = await arena.process(label, infra_attempts=3, slots=SLOTS)
        await actor.wait(60)


async def test_a_group_that_kills_its_worker_is_buried_after_its_budget_and_the_others_flow(arena: Arena) -> None:
    """One prompt made a simulator segfault. The queue gave it to the next worker at once, and the next; within
    minutes one row had killed the fleet thirty times and nothing else got through. Deaths count against the group:
    after its budget it is a dead letter, and its siblings are through before, but for those that were lost beside it.
    """
    rows = rows_of(10, 2)
    for row in rows[6:8]:
        row["trouble"] = "kill"
    fleet = [asyncio.create_task(_keep_alive(arena, label)) for label in ("s/0", "s/1")]
    try:
        async with arena.client() as client, client.run_groups(rows, 2, on_failure="yield") as batch:
            groups = [group async for group in batch]
    finally:
        for task in fleet:
            task.cancel()
        await asyncio.gather(*fleet, return_exceptions=True)
    failures = [group for group in groups if isinstance(group, GroupFailure)]
    assert [(failure.group_index, failure.type) for failure in failures] == [(3, "InstanceDied")]
    assert sum(isinstance(group, CompletedGroup) for group in groups) == 9
    beside = SLOTS - 1
    assert groups.index(failures[0]) >= 9 - beside, "the poison group held the others up"
    letters = arena.control.xrange(arena.keys.dead)
    assert [letter[b"reason"] for _, letter in letters] == [b"crashed"]
    assert letters[0][1][b"payload"], "the dead letter holds the group, so that it can be replayed"


async def test_scaling_down_with_work_pending_loses_none_and_counts_no_failure(arena: Arena) -> None:
    """An autoscaler took a replica away while its prefetched messages waited in its memory; they were lost with it,
    or came back as "failures" that used the retry budget up. A draining instance finishes or hands back what it has,
    and that is no failure.
    """
    leaving = await arena.process("s/0", slots=3)
    await arena.process("s/1", slots=3)
    async with arena.client() as client, client.run_groups(rows_of(16, 2, ms=150), 2) as batch:
        await arena.progress.until(lambda: len(leaving.held) >= 2)
        leaving.signal(signal.SIGTERM)
        groups = [group async for group in batch]
    assert await leaving.wait(10)
    assert leaving.code == 0
    assert len(groups) == 16
    assert batch.metrics["timing/rollout/redeliveries"] == 0
    assert batch.metrics["timing/rollout/retries"] == 0

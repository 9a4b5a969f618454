"""The worker loop: what is committed, how many groups run at once, who takes which group, how an instance leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from rolloutbus.broker.worker_transitions import WorkerTransitions
from rolloutbus.shard_workers import WorkerSettings
from rolloutbus.shard_workers.worker import ShardWorker
from rolloutbus.trainer import CompletedGroup, GroupFailure

from tests.stacks import EachRow, Row, Stack, WholeGroup, check_groups, groups_of, outcome_of, rows_of, until, within


@within(20)
async def test_a_group_that_is_committed_whole_shows_nothing_before_and_is_of_one_attempt(stack: Stack) -> None:
    go, half = asyncio.Event(), asyncio.Event()
    attempts = 0

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        nonlocal attempts
        attempts += 1
        yield rows[0], {"row": rows[0]["_rowidx"], "attempt": attempts}
        if attempts == 1:
            raise ConnectionError("half way")
        half.set()
        await go.wait()
        yield rows[1], {"row": rows[1]["_rowidx"], "attempt": attempts}

    await stack.worker(WholeGroup(behaviour), commit="group")
    client = await stack.connected()
    async with client.run_rollouts(rows_of(1), 2) as batch:
        await half.wait()
        assert stack.redis.xlen(stack.keys.results("trainer", "s")) == 0
        assert not stack.redis.exists(stack.keys.accepted(batch.id))
        go.set()
        rows = [item async for item in batch]
    assert sorted(rows, key=lambda row: row[0]) == [(0, {"row": 0, "attempt": 2}), (1, {"row": 1, "attempt": 2})]


@within(20)
async def test_no_more_groups_run_at_once_than_there_are_slots(stack: Stack) -> None:
    running, most = 0, 0
    full, go = asyncio.Event(), asyncio.Event()

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await go.wait()
        running -= 1
        for row in rows:
            yield row, {"row": row["_rowidx"]}

    worker = await stack.worker(WholeGroup(behaviour), slots=3)
    client = await stack.connected()
    async with client.run_groups(rows_of(30), 2) as batch:
        await full.wait()
        assert worker.statistics().running == 3
        # What waits for a slot waits on the stream, where another replica could take it.
        assert stack.redis.xpending(stack.keys.groups("s"), "workers")["pending"] <= 4
        go.set()
        check_groups(await groups_of(batch), 30)
    assert most == 3


class Held:
    """Rollouts that wait until they are let go, and remember who ran what."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def rollout(self, row: Row) -> Row:
        await self.go.wait()
        return {"row": row["_rowidx"]}


async def ended(stack: Stack, worker: ShardWorker) -> None:
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == f"worker {worker.identity.label}"]
    await task


@within(20)
async def test_a_draining_worker_lets_its_groups_finish_and_takes_no_other(stack: Stack) -> None:
    held = Held()
    worker = await stack.worker(EachRow(held.rollout), slots=2)
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2) as batch:
        await stack.happens("published", 4)
        await stack.happens("taken", 2)
        worker.drain()
        held.go.set()
        await ended(stack, worker)
        assert worker.statistics().ended == {"done": 2}
        assert stack.redis.xlen(stack.keys.groups("s")) == 2
        assert not stack.redis.exists(stack.keys.instance("s"))
        await stack.worker(label="s")
        groups = await groups_of(batch)
    check_groups(groups, 4)
    assert all(origin.attempt == 1 for group in groups if isinstance(group, CompletedGroup) for origin in group.origins)


@within(20)
async def test_a_stopped_worker_hands_its_groups_back_and_that_costs_no_attempt(stack: Stack) -> None:
    held = Held()
    environment = EachRow(held.rollout)
    worker = await stack.worker(environment, data_attempts=1, infra_attempts=1)
    client = await stack.connected()
    async with client.run_groups(rows_of(3), 2) as batch:
        await stack.happens("taken", 3)
        worker.stop()
        await ended(stack, worker)
        assert environment.running == 0
        assert worker.statistics().ended == {"released": 3}
        await stack.worker(label="s", data_attempts=1, infra_attempts=1)
        check_groups(await groups_of(batch), 3)
    assert batch.metrics["timing/rollout/redeliveries"] == 0
    assert batch.metrics["timing/rollout/retries"] == 0


@within(20)
async def test_a_drain_that_takes_too_long_hands_back_what_still_runs(stack: Stack) -> None:
    worker = await stack.worker(EachRow(Held().rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(2), 2) as batch:
        await stack.happens("taken", 2)
        worker.drain(timeout_s=0.1)
        await ended(stack, worker)
        assert worker.statistics().ended == {"released": 2}
        await stack.worker(label="s")
        check_groups(await groups_of(batch), 2)


@within(20)
async def test_a_worker_that_drains_can_be_told_to_stop_sooner_and_not_later(stack: Stack) -> None:
    """It waited for the first word's ten minutes, until its fleet killed it and its groups counted as crashed."""
    worker = await stack.worker(EachRow(Held().rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(2), 2):
        await stack.happens("taken", 2)
        worker.drain(timeout_s=600)
        await asyncio.sleep(0.1)
        worker.stop()
        worker.drain(timeout_s=600)
        await ended(stack, worker)
        assert worker.statistics().ended == {"released": 2}


@within(20)
async def test_the_run_of_an_attempt_that_failed_is_no_wait_of_the_next_one(stack: Stack) -> None:
    ran: list[int] = []

    async def rollout(row: Row) -> Row:
        ran.append(row["_rowidx"])
        if len(ran) <= 2:
            await asyncio.sleep(1.0)
            raise ConnectionError("not yet")
        return {"row": row["_rowidx"]}

    await stack.worker(EachRow(rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(1), 2) as batch:
        check_groups(await groups_of(batch), 1)
    assert batch.metrics["timing/rollout/retries"] == 1
    assert batch.metrics["timing/rollout/queue_wait"] < 0.9


@within(20)
async def test_a_lease_that_was_lost_cancels_the_local_rollout(stack: Stack) -> None:
    held = Held()
    environment = EachRow(held.rollout)
    worker = await stack.worker(environment)
    client = await stack.connected()
    async with client.run_groups(rows_of(1), 2) as batch:
        await stack.happens("taken", 1)
        key = stack.keys.batch(batch.id)
        words = stack.redis.hget(key, "g:0").decode().split(" ")
        stack.redis.hset(key, "g:0", " ".join([*words[:2], "another", *words[3:]]))
        await environment.idle.wait()
        await until(lambda: worker.statistics().ended)
        assert worker.statistics().ended == {"lost": 1}
    assert batch.counts.cancelled == 1


@within(20)
async def test_another_process_under_the_same_label_ends_this_one(stack: Stack) -> None:
    first = await stack.worker(EachRow(Held().rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(2), 2) as batch:
        await stack.happens("taken", 2)
        del stack.workers["s"]
        second = await stack.worker()
        check_groups(await groups_of(batch), 2)
    assert first.replaced
    assert not second.replaced
    assert first.statistics().ended == {"released": 2}


@within(20)
async def test_a_strangers_entry_is_set_aside_and_the_groups_behind_it_run(stack: Stack) -> None:
    stack.redis.xgroup_create(stack.keys.groups("s"), "workers", "0", mkstream=True)
    stack.redis.xadd(stack.keys.groups("s"), {"hello": "world"})
    stack.redis.xadd(stack.keys.groups("s"), {"kind": "group", "batch": "b", "group": "x", "client": "c", "route": "a"})
    stack.redis.pexpire(stack.keys.groups("s"), 60_000)
    await stack.worker()
    groups, _ = await outcome_of(stack, 3)
    check_groups(groups, 3)
    letters = [letter for _, letter in stack.redis.xrange(stack.keys.dead)]
    assert [letter[b"reason"] for letter in letters] == [b"foreign", b"foreign"]
    assert letters[0][b"hello"] == b"world"


@within(20)
async def test_a_group_whose_rows_were_changed_on_the_broker_fails_by_name(stack: Stack) -> None:
    from rolloutbus.broker import codec

    client = await stack.connected()
    async with client.run_groups(rows_of(1), 2, on_failure="yield") as batch:
        await stack.happens("published", 1)
        ((entry, fields),) = stack.redis.xrange(stack.keys.groups("s"))
        payload = b"".join(codec.encode_rows([{"_rowidx": 1}, {"_rowidx": 0}], first_row=0))
        stack.redis.xdel(stack.keys.groups("s"), entry)
        stack.redis.xadd(stack.keys.groups("s"), {**fields, b"payload": payload})
        await stack.worker(data_attempts=1)
        (failure,) = await groups_of(batch)
    assert isinstance(failure, GroupFailure)
    assert "row 0 says that it is row 1" in failure.message


@within(30)
async def test_idle_replicas_take_turns_exactly(stack: Stack) -> None:
    labels = ["s/0", "s/1", "s/2"]
    stack.host({"s": {"replicas": 3}})
    for label in labels:
        await stack.worker(label=label)
    client = await stack.connected()
    took: list[str] = []
    for _ in range(12):
        async with client.run_groups(rows_of(1), 2) as batch:
            (group,) = await groups_of(batch)
            assert isinstance(group, CompletedGroup)
            took.append(group.origins[0].instance)
    assert sorted(took[:3]) == labels
    assert took == took[:3] * 4


@within(30)
async def test_of_a_burst_each_of_two_equal_replicas_gets_at_least_a_third(stack: Stack) -> None:
    stack.host({"s": {"replicas": 2}})
    # In one process, so that the machine's scheduler makes neither of them slower than the other.
    workers = [await stack.worker(label=label) for label in ("s/0", "s/1")]
    client = await stack.connected()
    async with client.run_groups(rows_of(64), 2) as batch:
        check_groups(await groups_of(batch), 64)
    shares = [batch.metrics.get(f"timing/rollout/routing/groups/s/{at}", 0) for at in range(len(workers))]
    assert sum(shares) == 64
    assert min(shares) >= 64 / 3


@within(30)
async def test_a_replica_ten_times_slower_gets_less(stack: Stack) -> None:
    async def slowly(row: Row) -> Row:
        await asyncio.sleep(0.1)
        return {"row": row["_rowidx"]}

    async def quickly(row: Row) -> Row:
        await asyncio.sleep(0.01)
        return {"row": row["_rowidx"]}

    stack.host({"s": {"replicas": 2}})
    await stack.worker(EachRow(slowly), label="s/0", slots=1)
    await stack.worker(EachRow(quickly), label="s/1", slots=1)
    client = await stack.connected()
    async with client.run_groups(rows_of(40), 2) as batch:
        check_groups(await groups_of(batch), 40)
    shares = [batch.metrics.get(f"timing/rollout/routing/groups/s/{at}", 0) for at in (0, 1)]
    assert shares[0] < shares[1] / 3


@within(30)
async def test_a_group_scored_environment_over_two_replicas_never_waits_for_ever(stack: Stack) -> None:
    size = 4

    def meeting() -> Any:
        async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
            here = asyncio.Barrier(size)

            async def rollout(row: Row) -> tuple[Row, Row]:
                await here.wait()
                return row, {"row": row["_rowidx"]}

            tasks = [asyncio.create_task(rollout(row)) for row in rows]
            try:
                for task in asyncio.as_completed(tasks):
                    yield await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return behaviour

    stack.host({"s": {"replicas": 2}})
    for label in ("s/0", "s/1"):
        await stack.worker(WholeGroup(meeting()), label=label, slots=2)
    client = await stack.connected()
    async with client.run_groups(rows_of(20, size), size) as batch:
        groups = await groups_of(batch)
    check_groups(groups, 20, size)
    for group in groups:
        assert isinstance(group, CompletedGroup)
        assert len({origin.instance for origin in group.origins}) == 1


@within(20)
async def test_two_shards_each_run_their_own_routes(stack: Stack) -> None:
    stack.host({"left": {}, "right": {}}, {"a": "left", "b": "right", "c": "left"})
    ran: dict[str, set[str]] = {"left": set(), "right": set()}

    def noting(shard: str) -> Any:
        async def rollout(row: Row) -> Row:
            ran[shard].add(row["agent_ref"]["name"])
            return {"row": row["_rowidx"]}

        return EachRow(rollout)

    for shard in ran:
        await stack.worker(noting(shard), shard=shard)
    client = await stack.connected()
    async with client.run_groups(rows_of(12, route=["a", "b", "c"]), 2) as batch:
        check_groups(await groups_of(batch), 12)
    assert ran == {"left": {"a", "c"}, "right": {"b"}}


@within(20)
async def test_each_attempt_has_an_identity_of_its_own_and_the_callers_is_restored(stack: Stack) -> None:
    seen: list[str] = []

    async def rollout(row: Row) -> Row:
        seen.append(row["_group_id"])
        if len(seen) <= 2:
            raise ConnectionError("once more")
        return {"row": row["_rowidx"]}

    await stack.worker(EachRow(rollout))
    client = await stack.connected()
    rows = rows_of(1, _group_id="mine")
    async with client.run_groups(rows, 2) as batch:
        (group,) = await groups_of(batch)
    assert isinstance(group, CompletedGroup)
    assert len({name for name in seen if name.startswith(f"{batch.id}:0:")}) == len(set(seen)) > 1
    assert [row["_group_id"] for row in group.rows] == ["mine", "mine"]


@within(20)
async def test_a_worker_whose_broker_is_away_stops_without_waiting_for_it(stack: Stack) -> None:
    from rolloutbus.broker.embedded import EmbeddedBroker

    from tests.stacks import stack_on

    with EmbeddedBroker() as broker:
        async with stack_on(broker, reconnect_timeout_s=60.0) as away:
            away.host()
            worker = await away.worker(EachRow(Held().rollout))
            client = away.client()
            async with client.run_groups(rows_of(2), 2):
                await away.happens("taken", 2)
                broker.kill()
                # Long enough for each of its duties to notice.
                await asyncio.sleep(1.5)
                worker.stop()
                await asyncio.wait_for(ended(away, worker), 10)
                broker.restart()
                away.host()
            await client.close()


@within(20)
async def test_a_worker_that_is_cancelled_twice_leaves_nothing_that_goes_on(stack: Stack) -> None:
    """Its reader went on taking groups, which nobody renewed."""
    others = asyncio.all_tasks()
    worker = ShardWorker(stack.settings, stack.run, "s", "s", EachRow())
    running = asyncio.create_task(worker.run())
    await stack.reading("s", worker.identity.consumer)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    await until(lambda: asyncio.all_tasks() <= {*others, running})
    stack.redis.delete(stack.keys.groups("s"), stack.keys.instance("s"))


@within(20)
async def test_a_worker_that_is_cancelled_does_not_wait_for_a_broker_that_hangs(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(transitions: WorkerTransitions) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(WorkerTransitions, "leave", hang)
    worker = ShardWorker(stack.settings, stack.run, "s", "s", EachRow(), WorkerSettings(cancel_grace_s=0.2))
    running = asyncio.create_task(worker.run())
    await stack.reading("s", worker.identity.consumer)
    running.cancel()
    await asyncio.wait({running}, timeout=10)
    assert running.cancelled()
    assert "could not sign off (no answer)" in caplog.text
    stack.redis.delete(stack.keys.groups("s"), stack.keys.instance("s"))

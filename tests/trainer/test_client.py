"""The client as a trainer uses it: groups and rows as they complete, batches side by side, any loop, any thread."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import BooksError, RouteError, UnreadableResultError
from rolloutbus.trainer import BatchCounts, CompletedGroup, GroupFailure, RolloutClient
from rolloutbus.trainer.batch import GroupBatch

from tests.stacks import (
    EachRow,
    Gates,
    Row,
    Sealed,
    Stack,
    check_groups,
    groups_of,
    refuse,
    results_are_gone,
    rows_of,
    seal,
    sealed_rollout,
    stack_on,
    until,
    within,
)


async def failing_group_one(row: Row) -> Row:
    if row["_rowidx"] // 2 == 1:
        raise ValueError("unlucky")
    return {"row": row["_rowidx"]}


@within(20)
async def test_groups_come_whole_with_the_callers_rows_and_balanced_books(stack: Stack) -> None:
    await stack.worker()
    client = await stack.connected()
    rows = rows_of(20)
    async with client.run_groups(rows, 2) as batch:
        groups = await groups_of(batch)
    check_groups(groups, 20)
    assert all(group.rows[0] is rows[group.group_index * 2] for group in groups if isinstance(group, CompletedGroup))
    assert all(group.origins == [("s", 1), ("s", 1)] for group in groups if isinstance(group, CompletedGroup))
    assert {group.group_id for group in groups} == {f"{batch.id}:{at}" for at in range(20)}
    assert batch.counts == BatchCounts(20, 20, 0, 0)
    assert stack.keys_of(batch.id) == []


@within(20)
async def test_the_list_is_the_callers_own_again_while_its_batch_runs(stack: Stack) -> None:
    """Reordered, it gave rows the results of others; refilled, groups without rows; emptied, it ended the client."""
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    rows = rows_of(6)
    async with client.run_groups(rows, 2) as batch, client.run_rollouts(rows[:4], 2) as other:
        rows.reverse()
        gates.open(0)
        groups = [await anext(batch)]
        rows[:] = rows_of(1)
        gates.open(1, 2)
        groups += [await anext(batch), await anext(batch)]
        rows.clear()
        gates.open(3, 4, 5)
        check_groups([*groups, *await groups_of(batch)], 6)
        assert len(await groups_of(other)) == 4


@within(20)
async def test_rows_that_were_not_repeated_are_run_and_told_once(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt's rows passed once and `num_generations` of 2 made groups of two prompts, without a word."""
    await stack.worker()
    client = await stack.connected()
    for _ in range(2):
        async with client.run_groups(rows_of(4, size=1), 2) as batch:
            assert len(await groups_of(batch)) == 2
    assert caplog.text.count("the first 2 rows are one group, and their prompts differ") == 1


@within(20)
async def test_the_metrics_are_those_of_the_design(stack: Stack) -> None:
    stack.host({"s": {"replicas": 2}})
    for label in ("s/0", "s/1"):
        await stack.worker(label=label)
    client = await stack.connected(timer_prefix="mine")
    async with client.run_groups(rows_of(8), 2) as batch:
        await groups_of(batch)
    metrics = batch.metrics
    for name in ("await_results", "postprocess_results", "postprocess_results_pct", "queue_wait", "environment"):
        assert metrics[f"mine/{name}"] == max(metrics[f"mine/shard/s/{at}/{name}"] for at in (0, 1))
    assert metrics["mine/routing/groups/s/0"] + metrics["mine/routing/groups/s/1"] == 8
    assert 0 < metrics["mine/batch/postprocess_results_pct"] < 100
    for name in ("duplicate_rows", "stale_writes", "redeliveries", "retries", "dead_groups"):
        assert metrics[f"mine/{name}"] == 0


@within(20)
async def test_a_slow_group_holds_up_no_other(stack: Stack) -> None:
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    gates.open(*range(1, 8))
    async with client.run_groups(rows_of(8), 2) as batch:
        fast = [(await anext(batch)).group_index for _ in range(7)]
        assert sorted(fast) == list(range(1, 8))
        gates.open(0)
        assert [group.group_index async for group in batch] == [0]


@within(20)
async def test_rows_come_one_by_one_in_completion_order(stack: Stack) -> None:
    events = {index: asyncio.Event() for index in range(4)}

    async def rollout(row: Row) -> Row:
        await events[row["_rowidx"]].wait()
        return {"row": row["_rowidx"]}

    await stack.worker(EachRow(rollout))
    client = await stack.connected()
    async with client.run_rollouts(rows_of(2), 2) as batch:
        for index in (3, 0, 2, 1):
            events[index].set()
            assert await anext(batch) == (index, {"row": index})
        assert [item async for item in batch] == []
    assert batch.counts == BatchCounts(2, 2, 0, 0)


@within(20)
async def test_batches_run_side_by_side_and_a_paused_one_blocks_no_other(stack: Stack) -> None:
    await stack.worker()
    client = await stack.connected()
    async with client.run_groups(rows_of(10), 2) as paused, client.run_groups(rows_of(30), 2) as moving:
        first = await anext(paused)
        check_groups(await groups_of(moving), 30)
        check_groups([first, *await groups_of(paused)], 10)


@within(20)
async def test_books_that_do_not_balance_are_an_error_for_all_who_ask(stack: Stack) -> None:
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(2), 2) as batch:
        gates.open(0)
        await anext(batch)
        stack.redis.hincrby(stack.keys.batch(batch.id), "failed", 1)
        gates.open(1)
        await anext(batch)
        for _ in range(2):
            with pytest.raises(BooksError, match=f"the books of batch {batch.id} do not balance: 2 groups"):
                await anext(batch)


@within(20)
async def test_a_result_that_cannot_be_read_ends_its_batch_for_all_who_wait_and_no_other(stack: Stack) -> None:
    seal(refuse)
    await stack.worker(EachRow(sealed_rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2) as other, client.run_groups(rows_of(1, sealed=True), 2) as batch:
        ends = await asyncio.gather(*(anext(batch) for _ in range(6)), return_exceptions=True)
        assert {type(end) for end in ends} == {UnreadableResultError}, ends
        assert str(ends[0]).startswith(f"the result of row 0 of batch {batch.id}, from s, attempt 1, cannot be read")
        with pytest.raises(UnreadableResultError, match="no way back from 'sealed'"):
            await anext(batch)
        assert len(await groups_of(other)) == 4
    assert stack.keys_of(batch.id) == []


def refuse_slowly(value: Any) -> Sealed:
    time.sleep(0.3)
    return refuse(value)


@within(20)
async def test_nobody_is_told_that_all_went_well_while_the_last_result_is_being_unpacked(stack: Stack) -> None:
    """One thread of two that shared a batch took its end, and closed it, while the other one had the last result in
    hand, which could not be read.
    """
    seal(refuse_slowly)
    await stack.worker(EachRow(sealed_rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(1, sealed=True), 2) as batch:
        await until(lambda: batch.counts.completed == 1)
        ends = await asyncio.gather(
            *(asyncio.to_thread(asyncio.run, consume(batch)) for _ in range(2)), return_exceptions=True
        )
    assert [type(end) for end in ends] == [UnreadableResultError] * 2


async def consume(batch: GroupBatch) -> int:
    return len([group async for group in batch])


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, asyncio.CancelledError])
@within(20)
async def test_a_result_whose_unpacking_was_interrupted_comes_again(
    stack: Stack, interruption: type[BaseException]
) -> None:
    """Ctrl-C in the middle of a long list, and the group was gone although the batch ended well."""
    interruptions = iter([interruption])

    def interrupted_once(value: Any) -> Sealed:
        for kind in interruptions:
            raise kind
        return Sealed()

    seal(interrupted_once)
    await stack.worker(EachRow(sealed_rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(3, sealed=True), 2) as batch:
        with pytest.raises(interruption):
            # Not awaited as a task, which would end the event loop with it.
            await anext(batch)
        assert sorted([group.group_index async for group in batch]) == [0, 1, 2]


@within(20)
async def test_unpacking_what_has_come_leaves_other_tasks_their_turns(stack: Stack) -> None:
    async def rollout(row: Row) -> Row:
        return {"row": row["_rowidx"], "text": "x" * 100_000}

    await stack.worker(EachRow(rollout))
    client = await stack.connected()
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with client.run_groups(rows_of(10), 2) as batch:
        await until(lambda: batch.counts.completed == 10)
        others = asyncio.create_task(take_turns())
        assert len(await groups_of(batch)) == 10
        assert turns >= 9
        others.cancel()


@within(30)
async def test_a_paused_batch_over_its_bound_blocks_no_other_and_loses_nothing(broker: EmbeddedBroker) -> None:
    big = "x" * 20_000

    async def rollout(row: Row) -> Row:
        return {"row": row["_rowidx"], "text": big}

    async with stack_on(broker, max_unread_bytes=100_000, max_queued_bytes=100_000) as stack:
        stack.host()
        worker = await stack.worker(EachRow(rollout), slots=1)
        client = await stack.connected()
        paused = client.run_groups(rows_of(40), 2)
        async with paused:
            first = await anext(paused)
            async with client.run_groups(rows_of(20), 2) as moving:
                check_groups(await groups_of(moving), 20)
            await until(lambda: worker.statistics().running == 0)
            unread = int(stack.redis.hget(stack.keys.batch(paused.id), "unread_bytes") or 0)
            # The bound, and the one group that was begun below it.
            assert 100_000 <= unread <= 100_000 + 2 * 21_000
            check_groups([first, *await groups_of(paused)], 40)


@within(30)
async def test_a_new_event_loop_for_each_step_uses_one_client(stack: Stack) -> None:
    await stack.worker()
    client = stack.client()

    async def step() -> int:
        async with client.run_groups(rows_of(4), 2) as batch:
            return len(await groups_of(batch))

    def train() -> list[int]:
        client.connect_now()
        try:
            return [asyncio.run(step()) for _ in range(3)]
        finally:
            client.close_now()

    assert await asyncio.to_thread(train) == [4, 4, 4]


@within(30)
async def test_two_event_loops_in_two_threads_use_one_client_side_by_side(stack: Stack) -> None:
    await stack.worker()
    client = await stack.connected()
    meet = threading.Barrier(2)

    async def step() -> list[Any]:
        async with client.run_groups(rows_of(10), 2) as batch:
            first = await anext(batch)
            meet.wait(10)
            return [first, *await groups_of(batch)]

    for groups in await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(step())) for _ in range(2))):
        check_groups(groups, 10)


@within(30)
async def test_plain_code_gets_results_in_input_order(stack: Stack) -> None:
    await stack.worker()
    rows = rows_of(6)
    results = await asyncio.to_thread(
        RolloutClient.run_sync, stack.broker.url, rows, 2, run=stack.run, settings=stack.options
    )
    assert [result["row"] for result in results] == list(range(12))


@within(20)
async def test_a_failed_group_is_yielded_as_a_failure_where_asked_for(stack: Stack) -> None:
    await stack.worker(EachRow(failing_group_one), data_attempts=1)
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2, on_failure="yield") as batch:
        groups = await groups_of(batch)
    (failure,) = [group for group in groups if isinstance(group, GroupFailure)]
    assert (failure.group_index, list(failure.row_indices), failure.type) == (1, [2, 3], "ValueError")
    assert batch.counts == BatchCounts(4, 3, 1, 0)
    assert batch.metrics["timing/rollout/dead_groups"] == 1


@within(20)
async def test_plain_code_finds_a_failure_in_each_of_its_rows_places(stack: Stack) -> None:
    await stack.worker(EachRow(failing_group_one), data_attempts=1)
    results = await asyncio.to_thread(
        RolloutClient.run_sync,
        stack.broker.url,
        rows_of(3),
        2,
        run=stack.run,
        settings=stack.options,
        on_failure="yield",
    )
    assert [type(result).__name__ for result in results] == [
        "dict",
        "dict",
        "GroupFailure",
        "GroupFailure",
        "dict",
        "dict",
    ]


@within(20)
async def test_two_tasks_that_share_a_batch_get_each_group_once_and_both_end(stack: Stack) -> None:
    await stack.worker()
    client = await stack.connected()
    async with client.run_groups(rows_of(20), 2) as batch:
        shares = await asyncio.gather(groups_of(batch), groups_of(batch))
    check_groups([*shares[0], *shares[1]], 20)


@within(20)
async def test_a_wait_that_is_given_up_loses_no_group(stack: Stack) -> None:
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(3), 2) as batch:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(batch), 0.05)
        gates.open(0, 1, 2)
        check_groups(await groups_of(batch), 3)


@within(20)
async def test_the_same_row_index_in_the_next_batch_is_accepted(stack: Stack) -> None:
    await stack.worker()
    client = await stack.connected()
    rows = rows_of(3)
    for _ in range(3):
        async with client.run_groups(rows, 2) as batch:
            check_groups(await groups_of(batch), 3)


@within(20)
async def test_rows_that_are_in_two_batches_at_once_keep_their_places(stack: Stack) -> None:
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    rows = rows_of(6)
    gates.open(*range(6))
    async with client.run_groups(rows, 2) as one, client.run_groups(rows[::-1], 2) as other:
        for batch in (one, other):
            groups = await groups_of(batch)
            assert sorted(result["row"] for group in groups for result in group.results) == list(range(12))  # pyright: ignore


@within(20)
async def test_a_foreign_entry_among_the_results_changes_nothing(stack: Stack) -> None:
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(2), 2) as batch:
        await stack.happens("taken", 2)
        words = {"kind": "rows", "batch": batch.id, "group": "0", "attempt": "1", "instance": "s", "payload": "x"}
        for indices in ("99", "-1", "2", "x", "0,0"):
            stack.redis.xadd(stack.keys.results("trainer", "s"), {**words, "row_indices": indices})
        stack.redis.xadd(stack.keys.results("trainer", "s"), {"hello": "world"})
        gates.open(0, 1)
        check_groups(await groups_of(batch), 2)
    await results_are_gone(stack)


@within(20)
async def test_bad_rows_are_refused_before_anything_is_published(stack: Stack) -> None:
    client = await stack.connected()
    good = rows_of(2)
    mixed = [*good, *rows_of(1, route="z"), *rows_of(1)]
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "empty"),
        (good[:3], ValueError, "3 rows are no multiple"),
        ([*good[:1], "text"], TypeError, "row 1 is a str"),
        ([good[0], {"responses_create_params": {}}], RouteError, "row 1: the row has no route"),
        ([good[0], mixed[4]], RouteError, "begins at row 0 mixes routes: a, z"),
        (rows_of(1, route="z"), RouteError, "no shard hosts the route 'z'; hosted: a"),
        (good[:1] * 2, ValueError, "rows 0 and 1 are one and the same dict"),
    ]
    for bad, error, words in cases:
        with pytest.raises(error, match=words):
            client.run_groups(bad, 2)
    assert [key for key in stack.redis.scan_iter(f"{stack.keys.prefix}*") if b":batch:" in key] == []


@within(30)
async def test_a_shard_without_an_instance_fails_its_groups_by_name(broker: EmbeddedBroker) -> None:
    async with stack_on(broker, no_instance_timeout_s=0.3) as stack:
        stack.host()
        client = await stack.connected()
        async with client.run_groups(rows_of(2), 2, on_failure="yield") as batch:
            groups = await groups_of(batch)
        assert [type(group) for group in groups] == [GroupFailure, GroupFailure]
        assert all(
            "no live instance of shard s" in group.message for group in groups if isinstance(group, GroupFailure)
        )
        assert batch.counts == BatchCounts(2, 0, 2, 0)


@within(20)
async def test_what_was_acknowledged_comes_before_what_is_asked_of_the_client_next(stack: Stack) -> None:
    """It is passed on a moment later, and closing a batch must not overtake it."""
    await stack.worker(EachRow(failing_group_one))
    engine = (await stack.connected())._engine  # pyright: ignore[reportPrivateUsage]
    done: list[int] = []

    async def look() -> list[int]:
        return list(done)

    for at in range(3):
        engine.post(done.append, at)
        assert await asyncio.wrap_future(engine.call(look())) == list(range(at + 1))

"""The client as a trainer uses it: groups and rows as they complete, batches side by side, any loop, any thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest
from rolloutbus.broker.client_transitions import cancel_batch
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import (
    BatchCancelledError,
    BrokerAuthError,
    BrokerUnavailableError,
    ClientNameTakenError,
    ClosedError,
    EncodeError,
    GroupFailedError,
    NoInstanceError,
    RouteError,
)
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.trainer import BatchCounts, CompletedGroup, GroupFailure, RolloutClient

from tests.stacks import EachRow, Row, Stack, check_groups, groups_of, rows_of, stack_on, until, within

GONE_WITHIN_S = 2.0


class Gates:
    """Rollouts that wait until the test opens their group."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}
        self.ended = 0

    def __getitem__(self, group: int) -> asyncio.Event:
        return self._events.setdefault(group, asyncio.Event())

    def open(self, *groups: int) -> None:
        for group in groups:
            self[group].set()

    async def rollout(self, row: Row) -> Row:
        try:
            await self[row["_rowidx"] // 2].wait()
        finally:
            self.ended += 1
        return {"row": row["_rowidx"], "group_id": row["_group_id"]}


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
            unread = int(stack.redis.hget(stack.keys.batch(paused.id), "unread_bytes") or 0)
            # The bound, and the one group that was begun below it.
            assert 100_000 <= unread <= 100_000 + 2 * 21_000
            assert worker.statistics().running == 0
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


async def failing_group_one(row: Row) -> Row:
    if row["_rowidx"] // 2 == 1:
        raise ValueError("unlucky")
    return {"row": row["_rowidx"]}


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
async def test_a_failed_group_raises_otherwise_and_cleans_up(stack: Stack) -> None:
    environment = EachRow(failing_group_one)
    await stack.worker(environment, data_attempts=1)
    client = await stack.connected()
    batch = client.run_groups(rows_of(2), 2)
    with pytest.raises(
        GroupFailedError, match=r"group 1 \(rows 2 to 3\) failed for good on s, attempt 1: ValueError: unlucky"
    ):
        await groups_of(batch)
    assert stack.keys_of(batch.id) == []


async def gone(stack: Stack, batch: str, environment: EachRow) -> None:
    """Within two seconds no task of the batch runs and no key of it is there."""
    async with asyncio.timeout(GONE_WITHIN_S):
        await until(lambda: not environment.running and not stack.keys_of(batch))


@within(20)
async def test_leaving_after_the_third_group_ends_the_tasks_and_removes_the_keys(stack: Stack) -> None:
    gates = Gates()
    gates.open(0, 1, 2)
    environment = EachRow(gates.rollout)
    await stack.worker(environment)
    client = await stack.connected()
    count = 0
    async with client.run_groups(rows_of(12), 2) as batch:
        async for _ in batch:
            count += 1
            if count == 3:
                break
    await gone(stack, batch.id, environment)
    assert batch.counts == BatchCounts(12, 3, 0, 9)
    await results_are_gone(stack)


async def results_are_gone(stack: Stack) -> None:
    """Entries of a batch that was left used to stay on the client's result stream for as long as the client lived."""
    async with asyncio.timeout(5):
        await until(lambda: stack.redis.xlen(stack.keys.results("trainer", "s")) == 0)


@within(20)
async def test_results_that_nobody_took_leave_the_broker_with_the_batch(stack: Stack) -> None:
    await stack.worker()
    client = await stack.connected()
    async with client.run_groups(rows_of(30), 2) as batch:
        await anext(batch)
        await stack.happens("finished", 30)
    await results_are_gone(stack)


@within(20)
async def test_an_exception_downstream_cancels_the_batch(stack: Stack) -> None:
    environment = EachRow(Gates().rollout)
    await stack.worker(environment)
    client = await stack.connected()
    batch = client.run_groups(rows_of(4), 2)

    async def step() -> None:
        async with batch:
            await stack.happens("taken", 4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await step()
    await gone(stack, batch.id, environment)


@within(20)
async def test_a_batch_that_nobody_refers_to_any_more_is_cancelled(stack: Stack) -> None:
    environment = EachRow(Gates().rollout)
    await stack.worker(environment)
    client = await stack.connected()
    batch = client.run_groups(rows_of(4), 2)
    await stack.happens("taken", 4)
    name = batch.id
    del batch
    gc.collect()
    await gone(stack, name, environment)


@within(20)
async def test_cancelling_from_another_task_tells_the_one_that_waits(stack: Stack) -> None:
    """It used to wait for ever: the batch was closed, and nothing came for its iterator."""
    environment = EachRow(Gates().rollout)
    await stack.worker(environment)
    client = await stack.connected()
    batch = client.run_groups(rows_of(4), 2)
    waiting = asyncio.create_task(groups_of(batch))
    await stack.happens("taken", 4)
    await batch.cancel()
    with pytest.raises(BatchCancelledError, match=f"batch {batch.id} was cancelled by this client"):
        await waiting
    with pytest.raises(BatchCancelledError):
        await anext(batch)
    await gone(stack, batch.id, environment)


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
async def test_a_result_left_over_from_an_earlier_batch_is_not_accepted(stack: Stack) -> None:
    """The rollout ignores its cancellation and comes back when its batch is long over."""
    late, arrived = asyncio.Event(), asyncio.Event()
    group_ids: list[str] = []

    async def rollout(row: Row) -> Row:
        group_ids.append(row["_group_id"])
        if len(group_ids) <= 2:
            while not late.is_set():
                try:
                    await late.wait()
                except asyncio.CancelledError:
                    arrived.set()
        return {"row": row["_rowidx"], "group_id": row["_group_id"]}

    await stack.worker(EachRow(rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(1), 2) as earlier:
        await stack.happens("taken", 1)
    await arrived.wait()
    async with client.run_groups(rows_of(1), 2) as batch:
        late.set()
        (group,) = await groups_of(batch)
    assert isinstance(group, CompletedGroup)
    assert {result["group_id"].split(":")[0] for result in group.results} == {batch.id}
    assert earlier.id != batch.id
    await results_are_gone(stack)


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
async def test_a_second_process_under_the_same_name_is_refused_until_the_first_leaves(stack: Stack) -> None:
    async with stack.client():
        with pytest.raises(ClientNameTakenError, match=r"client 'trainer' of run .* belongs to another live process"):
            async with stack.client():
                pass
        async with stack.client(client="validation"):
            pass
    async with stack.client():
        pass


@within(20)
async def test_waiting_for_a_name_gets_it_when_it_is_given_up(stack: Stack) -> None:
    first = stack.client()
    await first.__aenter__()
    second = stack.client(name_wait_s=10.0)
    entering = asyncio.create_task(second.__aenter__())
    await stack.watch.ping()
    await first.close()
    await entering
    await second.close()


@within(20)
async def test_a_broker_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(BrokerUnavailableError, match=r"redis://127\.0\.0\.1:1") as caught:
        async with RolloutClient.connect("redis://127.0.0.1:1", run="r"):
            pass
    assert isinstance(caught.value, ConnectionError)


@within(20)
async def test_a_wrong_password_is_told_without_telling_it() -> None:
    with EmbeddedBroker(tcp=True, password="right") as server:
        url = server.url.replace("right", "wrong-one")
        with pytest.raises(BrokerAuthError) as caught:
            async with RolloutClient.connect(url, run="r"):
                pass
    assert "wrong-one" not in str(caught.value)


@within(20)
async def test_without_a_fleet_the_wait_ends_by_name_and_a_second_try_may_follow_at_once(
    broker: EmbeddedBroker,
) -> None:
    async with stack_on(broker) as stack:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(NoInstanceError, match=f"run '{stack.run}' within 0.2 s"):
                async with stack.client(fleet_wait_s=0.2):
                    pass
            assert time.monotonic() - began < 5
        stack.host()
        async with stack.client():
            pass


@within(20)
async def test_giving_up_on_a_connection_ends_its_thread_and_frees_its_name(broker: EmbeddedBroker) -> None:
    async with stack_on(broker) as stack:
        client = stack.client(fleet_wait_s=60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.__aenter__(), 0.2)
        await client.close()
        stack.host()
        async with stack.client():
            pass


@within(20)
async def test_a_closed_client_says_so(stack: Stack) -> None:
    client = stack.client()
    async with client:
        pass
    await client.close()
    with pytest.raises(ClosedError):
        client.run_groups(rows_of(1), 2)


@within(20)
async def test_closing_the_client_ends_open_batches_with_an_error_and_cleans_up(stack: Stack) -> None:
    environment = EachRow(Gates().rollout)
    await stack.worker(environment)
    client = stack.client()
    await client.__aenter__()
    batch = client.run_groups(rows_of(2), 2)
    waiting = asyncio.create_task(groups_of(batch))
    await stack.happens("taken", 2)
    await client.close()
    with pytest.raises(ClosedError, match="close the batch first"):
        await waiting
    await gone(stack, batch.id, environment)


@within(20)
async def test_an_operators_cancellation_is_told_with_its_reason(stack: Stack) -> None:
    from rolloutbus.broker.channel import Link

    environment = EachRow(Gates().rollout)
    await stack.worker(environment)
    client = await stack.connected()
    async with client.run_groups(rows_of(3), 2) as batch:
        await stack.happens("taken", 3)
        link = Link(BrokerSettings(url=stack.broker.url), "operator")
        assert await cancel_batch(link, stack.keys, batch.id, "trainer", ["s"], "too dear") == 3
        await link.close()
        with pytest.raises(BatchCancelledError, match="cancelled by an operator: too dear"):
            await groups_of(batch)
    await gone(stack, batch.id, environment)


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


@within(20)
async def test_a_row_the_codec_cannot_take_ends_the_batch_with_its_name_and_nothing_hangs(stack: Stack) -> None:
    environment = EachRow()
    await stack.worker(environment)
    client = await stack.connected()
    rows = rows_of(20)
    rows[39]["responses_create_params"]["seed"] = 2**64
    batch = client.run_groups(rows, 2)
    with pytest.raises(EncodeError, match=r"row 39.*responses_create_params.*seed"):
        await groups_of(batch)
    await gone(stack, batch.id, environment)
    async with client.run_groups(rows[:20], 2) as batch:
        check_groups(await groups_of(batch), 10)


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

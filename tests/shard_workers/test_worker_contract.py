"""What an environment does against its contract, seen through the whole way: a clear failure, nothing lost, nothing
hung, the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from rolloutbus.broker.errors import GroupFailedError
from rolloutbus.shard_workers.fleet.loop_thread import LoopThread
from rolloutbus.shard_workers.worker import ShardWorker
from rolloutbus.shard_workers.worker_settings import WorkerSettings
from rolloutbus.trainer import BatchCounts, CompletedGroup, GroupFailure

from tests.stacks import EachRow, Row, Stack, WholeGroup, check_groups, groups_of, rows_of, until, within

BAD_GROUP = 1
BAD_ROWS = {2, 3}


def misbehaving(bad: Callable[[Sequence[Row]], AsyncGenerator[Any]]) -> WholeGroup:
    """An environment that behaves for every group but group 1."""

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        if rows[0]["_rowidx"] in BAD_ROWS:
            async for outcome in bad(rows):
                yield outcome
            return
        for row in rows:
            yield row, {"row": row["_rowidx"]}

    return WholeGroup(behaviour)


def yielding(*outcomes: Any) -> Callable[[Sequence[Row]], AsyncGenerator[Any]]:
    async def bad(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome(rows) if callable(outcome) else outcome

    return bad


def row_with(result: Any) -> Callable[[Sequence[Row]], Any]:
    return lambda rows: (rows[0], result)


async def cancels_its_own_task(rows: Sequence[Row]) -> AsyncGenerator[Any]:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    yield None


CASES: dict[str, tuple[Callable[[Sequence[Row]], AsyncGenerator[Any]], str, str]] = {
    "a foreign row index": (
        yielding((0, {})),
        "EnvironmentContractError",
        "row index 0, which is not in this group (2, 3)",
    ),
    "a negative row index": (yielding((-1, {})), "EnvironmentContractError", "row index -1"),
    "a boolean row index": (yielding((True, {})), "EnvironmentContractError", "row index True"),
    "a string as row index": (yielding(("2", {})), "EnvironmentContractError", "row index '2'"),
    "a repeated row": (yielding(row_with({}), row_with({})), "EnvironmentContractError", "row 2 came back twice"),
    "too few rows": (yielding(row_with({})), "EnvironmentContractError", "without a result for rows 3"),
    "no row": (yielding(), "EnvironmentContractError", "without a result for rows 2, 3"),
    "None as a result": (yielding(row_with(None)), "EnvironmentContractError", "row 2 came back with None"),
    "a list as a result": (yielding(row_with([1])), "EnvironmentContractError", "row 2 came back with [1]"),
    "None in place of a pair": (yielding(None), "EnvironmentContractError", "yielded None"),
    "a set inside a result": (yielding(row_with({"a": [{1}]})), "EncodeError", "result of row 2"),
    "a number too large": (yielding(row_with({"deep": {"er": 2**64}})), "EncodeError", "deep"),
    "an exception": (yielding(KeyError("reward")), "KeyError", "'reward'"),
    "an exception for one row": (yielding(row_with(ValueError("bad row"))), "ValueError", "bad row"),
    "CancelledError of its own": (
        yielding(asyncio.CancelledError()),
        "EnvironmentCancelledError",
        "CancelledError by itself",
    ),
    "its own task cancelled": (cancels_its_own_task, "EnvironmentCancelledError", "cancelled the task"),
    "SystemExit": (yielding(SystemExit(2)), "EnvironmentContractError", "SystemExit(2)"),
}


@pytest.mark.parametrize("case", CASES)
@within(20)
async def test_an_environment_that_breaks_its_contract_fails_its_group_only(stack: Stack, case: str) -> None:
    bad, kind, words = CASES[case]
    environment = misbehaving(bad)
    await stack.worker(environment, data_attempts=2)
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2, on_failure="yield") as batch:
        groups = await groups_of(batch)
    (failure,) = [group for group in groups if isinstance(group, GroupFailure)]
    assert (failure.group_index, failure.failure_class, failure.type, failure.attempt) == (BAD_GROUP, "data", kind, 2)
    assert words in failure.message
    assert failure.instance == "s"
    assert sorted(g.group_index for g in groups if isinstance(g, CompletedGroup)) == [0, 2, 3]
    assert environment.calls.count([2, 3]) == 2
    assert batch.counts == BatchCounts(4, 3, 1, 0)
    (letter,) = stack.redis.xrange(stack.keys.dead)
    assert (letter[1][b"group"], letter[1][b"failed_attempt"]) == (b"1", b"2")


@within(20)
async def test_a_result_above_the_limit_is_named_with_its_size(stack: Stack) -> None:
    stack.options["max_payload_bytes"] = 5000
    await stack.worker(misbehaving(yielding(row_with({"text": "x" * 6000}))), data_attempts=1)
    client = await stack.connected()
    with pytest.raises(
        GroupFailedError, match=r"PayloadTooLargeError: the result of row 2 is 60\d\d bytes, above max_payload_bytes"
    ):
        async with client.run_groups(rows_of(4), 2) as batch:
            await groups_of(batch)


@within(20)
async def test_an_environment_that_changes_its_rows_changes_nothing_else(stack: Stack) -> None:
    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        indices = [row["_rowidx"] for row in rows]
        for row in rows:
            row.clear()
        for index in reversed(indices):
            yield index, {"row": index}

    await stack.worker(WholeGroup(behaviour))
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2) as batch:
        check_groups(await groups_of(batch), 4)


@within(20)
async def test_a_row_that_never_ends_fails_its_group_at_the_deadline_and_the_others_came_long_before(
    stack: Stack,
) -> None:
    async def rollout(row: Row) -> Row:
        if row["_rowidx"] == 0:
            await asyncio.Event().wait()
        return {"row": row["_rowidx"]}

    environment = EachRow(rollout)
    client = await stack.connected()
    async with client.run_groups(rows_of(8), 2, on_failure="yield") as batch:
        # The deadline counts from when the first group is taken, so publishing must not go on beside it.
        await stack.happens("published", 8)
        began = time.monotonic()
        await stack.worker(environment, group_timeout_s=1.0)
        others = [await anext(batch) for _ in range(7)]
        others_took = time.monotonic() - began
        failure = await anext(batch)
        took = time.monotonic() - began
    assert all(isinstance(group, CompletedGroup) for group in others)
    assert isinstance(failure, GroupFailure)
    assert (failure.group_index, failure.type, failure.failure_class) == (0, "DeadlineExceededError", "infra")
    assert "within 1 s over all its attempts" in failure.message
    assert 0.9 < took < 5
    assert others_took < took / 2
    assert environment.running == 0


@within(20)
async def test_the_deadline_counts_over_all_attempts(stack: Stack) -> None:
    async def rollout(row: Row) -> Row:
        await asyncio.sleep(0.05)
        raise ConnectionError("again")

    await stack.worker(EachRow(rollout), group_timeout_s=1.0, infra_attempts=1000)
    client = await stack.connected()
    async with client.run_groups(rows_of(1), 2, on_failure="yield") as batch:
        (failure,) = await groups_of(batch)
    assert isinstance(failure, GroupFailure)
    assert failure.type == "DeadlineExceededError"
    assert failure.attempt > 1


@within(30)
async def test_an_environment_that_blocks_the_event_loop_keeps_its_lease(stack: Stack) -> None:
    async def rollout(row: Row) -> Row:
        if row["_rowidx"] == 0:
            time.sleep(5 * stack.options["lease_s"])  # noqa: ASYNC251
        return {"row": row["_rowidx"]}

    stack.host({"s": {"replicas": 2}})
    await stack.process(label="s/1")
    environment = EachRow(rollout)
    blocked = await stack.worker(environment, label="s/0", slots=1)
    client = await stack.connected()
    async with client.run_groups(rows_of(2), 2) as batch:
        groups = await groups_of(batch)
    check_groups(groups, 2)
    assert all(set(group.origins) <= {("s/0", 1), ("s/1", 1)} for group in groups if isinstance(group, CompletedGroup))
    assert batch.metrics["timing/rollout/redeliveries"] == batch.metrics["timing/rollout/stale_writes"] == 0
    # It may hear of its group's end after the trainer has.
    await until(lambda: blocked.statistics().ended == {"done": 1})


@within(20)
async def test_an_environment_that_swallows_its_cancellation_is_left_behind_and_writes_nothing(stack: Stack) -> None:
    let_go, gave_way = asyncio.Event(), asyncio.Event()

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        if rows[0]["_rowidx"] != 0:
            for row in rows:
                yield row, {"row": row["_rowidx"]}
            return
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                gave_way.set()
        for row in rows:
            yield row, {"row": "too late"}

    worker = await stack.worker(WholeGroup(behaviour), group_timeout_s=0.3, slots=1)
    client = await stack.connected()
    async with client.run_groups(rows_of(3), 2, on_failure="yield") as batch:
        groups = await groups_of(batch)
        assert gave_way.is_set()
        let_go.set()
    assert [type(g) for g in sorted(groups, key=lambda g: g.group_index)] == [
        GroupFailure,
        CompletedGroup,
        CompletedGroup,
    ]
    assert worker.statistics().ended == {"dead": 1, "done": 2}


@pytest.mark.parametrize("wanted", [SystemExit(3), KeyboardInterrupt()], ids=repr)
@within(30)
async def test_an_exit_in_a_task_of_the_environment_fails_its_group_and_the_instance_goes_on(
    stack: Stack, wanted: BaseException
) -> None:
    """asyncio takes it out of the task through the event loop, which a fleet's instance runs again."""
    meet: list[int] = []

    async def rollout(row: Row) -> Row:
        if row["_rowidx"] in BAD_ROWS:
            raise wanted
        meet.append(row["_rowidx"])
        while len(meet) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return {"row": row["_rowidx"]}

    instance = LoopThread("instance")
    worker = ShardWorker(stack.settings, stack.run, "s", "s", EachRow(rollout), WorkerSettings(data_attempts=1))
    working = instance.submit(worker.run())
    await stack.reading("s", worker.identity.consumer)
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2, on_failure="yield") as batch:
        groups = await groups_of(batch)
    (failure,) = [group for group in groups if isinstance(group, GroupFailure)]
    assert (failure.group_index, failure.type) == (BAD_GROUP, "EnvironmentContractError")
    assert f"the environment raised {type(wanted).__name__}(" in failure.message
    assert batch.counts == BatchCounts(4, 3, 1, 0)
    instance.loop.call_soon_threadsafe(worker.stop)
    await asyncio.wrap_future(working)
    await asyncio.to_thread(instance.close)


@pytest.mark.parametrize("wanted", [SystemExit(3), KeyError("group")], ids=repr)
@within(20)
async def test_rows_are_not_failed_by_what_is_told_about_their_times(
    stack: Stack, caplog: pytest.LogCaptureFixture, wanted: BaseException
) -> None:
    class Reporting(EachRow):
        def take_timing(self, group_id: str) -> dict[str, float]:
            raise wanted

    await stack.worker(Reporting(), data_attempts=1)
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2) as batch:
        check_groups(await groups_of(batch), 4)
    assert "its times are left out: take_timing raised" in caplog.text
    assert f"{type(wanted).__name__}({wanted!s})" in caplog.text
    assert batch.counts == BatchCounts(4, 4, 0, 0)

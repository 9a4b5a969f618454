"""The adapter, driven the way NeMo RL's rollout loop drives its Gym actor: tasks around `anext`, one item awaited at
a time.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ClosedError, GroupFailedError, NoInstanceError, RowError, UnreadableResultError
from rolloutbus.trainer import NemoRLEnvironment

from tests.stacks import EachRow, Row, Stack, refuse, rows_of, seal, sealed_rollout, within

PREFIX = "timing/train"
SIZE = 4


class Rollouts:
    """Rollouts of prompts in `held` wait; the others give tokens as a worker does, as arrays."""

    def __init__(self, *held: int) -> None:
        self.held = set(held)
        self.started = asyncio.Event()

    async def rollout(self, row: Row) -> Row:
        if row["prompt"] in self.held:
            self.started.set()
            await asyncio.Event().wait()
        tokens = numpy.arange(3) + row["prompt"]
        return {"message_log": [{"role": "assistant", "token_ids": tokens}], "prompt": row["prompt"], "plain": [1, 2]}


@pytest.fixture
def environment(stack: Stack) -> Iterator[NemoRLEnvironment]:
    made = adapter(stack)
    yield made
    made.shutdown()


def adapter(stack: Stack, num_generations: int = SIZE, fleet_wait_s: float = 5, **options: Any) -> NemoRLEnvironment:
    return NemoRLEnvironment(
        stack.broker.url,
        run=stack.run,
        num_generations=num_generations,
        settings=stack.options,
        fleet_wait_s=fleet_wait_s,
        **options,
    )


def batch_of(prompts: int, first: int = 0) -> list[Row]:
    """Rows as the loop makes them: numbered over its whole batch, of which these prompts are a part."""
    rows = rows_of(prompts, SIZE)
    for at, row in enumerate(rows):
        row |= {"_rowidx": first * SIZE + at, "prompt": first + at // SIZE}
    return rows


async def drive(environment: NemoRLEnvironment, rows: list[Row]) -> list[Any]:
    """Every item, the next one asked for in a task of its own as the loop does."""
    stream = environment.run_rollouts.options(num_returns="streaming").remote(
        rows, object(), PREFIX, deduplicate_multimodal_data=False
    )
    source = aiter(stream)
    items: list[Any] = []
    while True:
        pending = asyncio.ensure_future(anext(source))
        try:
            await asyncio.wait({pending})
            items.append(await pending.result())
        except StopAsyncIteration:
            return items


@within(20)
async def test_a_whole_batch_in_one_call_gives_each_row_once_with_the_metrics_on_the_last(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    await stack.worker(EachRow(Rollouts().rollout))
    rows = batch_of(5)
    items = await drive(environment, rows)
    assert sorted(index for index, _, _ in items) == list(range(20))
    for index, result, _ in items:
        assert result["prompt"] == index // SIZE
    *before, (_, _, last) = items
    assert [timing for _, _, timing in before] == [None] * 19
    assert last[f"{PREFIX}/routing/groups/s"] == 5
    assert last[f"{PREFIX}/await_results"] >= 0
    assert {name.rsplit("/", 1)[-1] for name in last} >= {
        "environment",
        "queue_wait",
        "postprocess_results_pct",
        "retries",
    }
    assert all(name.startswith(f"{PREFIX}/") for name in last)


@within(20)
async def test_the_callers_rows_are_left_as_they_are(stack: Stack, environment: NemoRLEnvironment) -> None:
    await stack.worker(EachRow(Rollouts().rollout))
    rows, same = batch_of(2, first=7), batch_of(2, first=7)
    items = await drive(environment, rows)
    assert rows == same
    assert sorted(index for index, _, _ in items) == list(range(28, 36))


@within(30)
async def test_two_hundred_calls_of_one_group_each_run_side_by_side(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    await stack.worker(EachRow(Rollouts().rollout))
    calls = await asyncio.gather(*(drive(environment, batch_of(1, first=prompt)) for prompt in range(200)))
    for prompt, items in enumerate(calls):
        assert sorted(index for index, _, _ in items) == list(range(prompt * SIZE, prompt * SIZE + SIZE))
        assert items[-1][2][f"{PREFIX}/routing/groups/s"] == 1


@within(20)
async def test_token_arrays_may_be_written_to(stack: Stack, environment: NemoRLEnvironment) -> None:
    await stack.worker(EachRow(Rollouts().rollout))
    for _, result, _ in await drive(environment, batch_of(1)):
        [message] = result["message_log"]
        message["token_ids"][0] = -1
        assert result["plain"] == [1, 2]


@within(20)
async def test_interleaved_rows_of_several_prompts_are_put_into_their_groups(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    ran = EachRow(Rollouts().rollout)
    await stack.worker(ran)
    rows = batch_of(3)
    items = await drive(environment, rows[::-1])
    assert {index: result["prompt"] for index, result, _ in items} == {at: at // SIZE for at in range(12)}


@within(20)
async def test_a_part_of_a_group_is_refused_with_the_setting_that_asked_for_it(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    ran = EachRow()
    await stack.worker(ran)
    with pytest.raises(RowError, match=r"row 5 is of group 1.*max_gym_row_attempts: 1"):
        await drive(environment, batch_of(2)[5:])
    assert ran.ran == []


@within(20)
async def test_a_part_of_a_group_runs_where_rows_are_independent_beside_groups_that_are_whole(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    stack.host({"s": {"rerun": "missing"}})
    await stack.worker(EachRow(Rollouts().rollout), rerun="missing")
    items = await drive(environment, batch_of(3)[2:])
    assert sorted(index for index, _, _ in items) == list(range(2, 12))
    assert [timing is None for _, _, timing in items] == [True] * 9 + [False]


@within(20)
@pytest.mark.parametrize("held", [0, 1])
async def test_neither_whole_groups_nor_single_rows_wait_for_the_others(
    stack: Stack, environment: NemoRLEnvironment, held: int
) -> None:
    """They are two batches, and the second was not looked at until the first was over."""
    gate = asyncio.Event()

    async def rollout(row: Row) -> Row:
        if row["prompt"] == held:
            await gate.wait()
        return {"prompt": row["prompt"]}

    stack.host({"s": {"rerun": "missing"}})
    await stack.worker(EachRow(rollout), rerun="missing")
    whole, single = {0, 1, 2, 3}, {4, 5}
    free, waiting = (single, whole) if held == 0 else (whole, single)
    stream = environment.run_rollouts.remote(batch_of(2)[:6], None, PREFIX)
    first = [await (await anext(stream)) for _ in free]
    assert {index for index, _, _ in first} == free
    gate.set()
    *before, (_, _, metrics) = [*first, *[await ready async for ready in stream]]
    assert {index for index, _, _ in before} | waiting == whole | single
    assert [timing for _, _, timing in before] == [None] * 5
    # That of the single rows, which are more groups.
    assert metrics is not None
    assert metrics[f"{PREFIX}/routing/groups/s"] == 2
    assert stack.redis.keys(f"{stack.keys.prefix}batch:*") == []


@within(20)
async def test_two_rows_with_one_number_are_refused(environment: NemoRLEnvironment, stack: Stack) -> None:
    rows = batch_of(1)
    rows[1]["_rowidx"] = 0
    with pytest.raises(RowError, match="_rowidx 0"):
        await drive(environment, rows)


@within(20)
async def test_validation_has_its_own_group_size_over_the_same_connection(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    await stack.worker(EachRow(Rollouts().rollout))
    validation = environment.with_num_generations(1)
    assert len(await drive(validation, batch_of(2)[:7])) == 7
    assert len(await drive(environment, batch_of(1))) == SIZE
    assert len(stack.redis.keys(f"{stack.keys.prefix}*owner*")) == 1


@within(20)
async def test_cancelling_the_pending_anext_cancels_the_batch(stack: Stack, environment: NemoRLEnvironment) -> None:
    rollouts = Rollouts(0)
    ran = EachRow(rollouts.rollout)
    await stack.worker(ran)
    stream = environment.run_rollouts.remote(batch_of(1), None, PREFIX)
    pending = asyncio.ensure_future(anext(stream))
    await rollouts.started.wait()
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    await ran.idle.wait()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@within(20)
async def test_leaving_with_nothing_pending_and_closing_cancels_the_batch(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    rollouts = Rollouts(1)
    ran = EachRow(rollouts.rollout)
    await stack.worker(ran)
    stream = environment.run_rollouts.remote(batch_of(2), None, PREFIX)
    async for ready in stream:
        await ready
        break
    await rollouts.started.wait()
    await stream.aclose()
    await stream.aclose()
    await ran.idle.wait()


@within(20)
async def test_a_stream_that_is_dropped_unclosed_cancels_the_batch(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    """NeMo RL calls `ray.cancel` on Ray's own generators only; this one has its last reference to go by."""
    rollouts = Rollouts(1)
    ran = EachRow(rollouts.rollout)
    await stack.worker(ran)
    stream = environment.run_rollouts.remote(batch_of(2), None, PREFIX)
    await (await anext(stream))
    await rollouts.started.wait()
    del stream
    gc.collect()
    await ran.idle.wait()


@within(20)
async def test_a_stream_that_nobody_ever_asks_is_cancelled_when_it_is_dropped(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    rollouts = Rollouts(0)
    ran = EachRow(rollouts.rollout)
    await stack.worker(ran)
    stream = environment.run_rollouts.remote(batch_of(1), None, PREFIX)
    await rollouts.started.wait()
    del stream
    gc.collect()
    await ran.idle.wait()


@within(20)
@pytest.mark.parametrize(
    ("raised", "transport"), [(TimeoutError("slow"), True), (ConnectionError("gone"), True), (ValueError("bad"), False)]
)
async def test_a_failed_group_is_a_connection_error_where_its_cause_was_infrastructure(
    stack: Stack, environment: NemoRLEnvironment, raised: Exception, transport: bool
) -> None:
    async def fail(row: Row) -> Row:
        raise raised

    await stack.worker(EachRow(fail), infra_attempts=2, data_attempts=1)
    with pytest.raises(GroupFailedError, match=rf"rows 8, 9, 10, 11 failed.*{raised}") as caught:
        await drive(environment, batch_of(1, first=2))
    assert isinstance(caught.value, ConnectionError) == transport
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@within(20)
async def test_the_failure_comes_from_the_awaitable_and_the_stream_is_over_after_it(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    async def fail(row: Row) -> Row:
        raise ValueError("bad")

    await stack.worker(EachRow(fail), data_attempts=1)
    stream = environment.run_rollouts.remote(batch_of(1), None, PREFIX)
    ready = await anext(stream)
    with pytest.raises(GroupFailedError):
        await ready
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@within(20)
async def test_a_result_that_cannot_be_read_is_named_by_the_callers_own_number(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    seal(refuse)
    await stack.worker(EachRow(sealed_rollout))
    rows = [{**row, "sealed": row["prompt"] == 21} for row in batch_of(2, first=20)]
    with pytest.raises(
        UnreadableResultError, match=r"the result of row 8[4-7] of batch \w+, from s, attempt 1, cannot"
    ):
        await drive(environment, rows)


@within(20)
async def test_health_tells_that_a_shard_has_no_instance_and_is_silent_when_all_have(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    with pytest.raises(NoInstanceError, match="no live instance of s") as caught:
        await environment.health_check.remote()
    assert isinstance(caught.value, TimeoutError)
    await stack.worker()
    await environment.health_check.remote()


@within(20)
async def test_a_broker_that_is_not_there_is_a_connection_error(stack: Stack) -> None:
    lost = NemoRLEnvironment("unix:///nowhere/sock", run=stack.run, num_generations=SIZE)
    try:
        with pytest.raises(ConnectionError):
            await drive(lost, batch_of(1))
        with pytest.raises(ConnectionError):
            await lost.health_check.remote()
    finally:
        lost.shutdown()


@within(20)
async def test_it_pickles_also_after_use_and_each_copy_connects_under_a_name_of_its_own(
    stack: Stack, environment: NemoRLEnvironment
) -> None:
    await stack.worker(EachRow(Rollouts().rollout))
    assert len(await drive(environment, batch_of(1))) == SIZE
    copy: NemoRLEnvironment = pickle.loads(pickle.dumps(environment))
    try:
        assert len(await drive(copy, batch_of(1))) == SIZE
        assert len(stack.redis.keys(f"{stack.keys.prefix}*owner*")) == 2
    finally:
        copy.shutdown()


@within(20)
async def test_it_is_shut_down_by_a_plain_call_twice_and_refuses_what_comes_after(stack: Stack) -> None:
    environment = adapter(stack)
    await stack.worker(EachRow(Rollouts().rollout))
    await drive(environment, batch_of(1))
    environment.shutdown()
    environment.shutdown()
    with pytest.raises(ClosedError):
        environment.run_rollouts.remote(batch_of(1), None, PREFIX)


@within(20)
async def test_shutting_down_before_the_first_use_connects_to_nothing(stack: Stack) -> None:
    NemoRLEnvironment("unix:///nowhere/sock", run=stack.run, num_generations=SIZE).shutdown()


@within(30)
async def test_one_event_loop_per_step_as_the_synchronous_trainer_has_it(
    broker: EmbeddedBroker, stack: Stack, environment: NemoRLEnvironment
) -> None:
    await stack.worker(EachRow(Rollouts().rollout))

    def steps() -> list[int]:
        return [len(asyncio.run(drive(environment, batch_of(2)))) for _ in range(3)]

    assert await asyncio.to_thread(steps) == [2 * SIZE] * 3


def test_a_group_size_below_one_and_a_call_that_does_not_stream_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NemoRLEnvironment("redis://localhost", run="r", num_generations=0)
    environment = NemoRLEnvironment("redis://localhost", run="r", num_generations=1)
    with pytest.raises(ValueError, match="streaming"):
        environment.run_rollouts.options(num_returns=1)  # pyright: ignore[reportArgumentType]

"""A batch that ends before its time: whoever ends it, its waiters are told and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from rolloutbus.broker.client_transitions import ClientTransitions, cancel_batch
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import (
    BatchCancelledError,
    ClosedError,
    EncodeError,
    GroupFailedError,
)
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.trainer import BatchCounts, CompletedGroup

from tests.stacks import (
    EachRow,
    Gates,
    Row,
    Stack,
    check_groups,
    gone,
    groups_of,
    results_are_gone,
    rows_of,
    stack_on,
    until,
    within,
)


async def failing_group_one(row: Row) -> Row:
    if row["_rowidx"] // 2 == 1:
        raise ValueError("unlucky")
    return {"row": row["_rowidx"]}


@within(20)
async def test_a_failed_group_raises_otherwise_and_cleans_up(stack: Stack) -> None:
    environment = EachRow(failing_group_one)
    await stack.worker(environment, data_attempts=1)
    client = await stack.connected()
    batch = client.run_groups(rows_of(2), 2)
    words = r"group 1 \(rows 2 to 3\) failed for good on s, attempt 1: ValueError: unlucky"
    line = r" \(test_leaving.py, line \d+, in failing_group_one\)"
    with pytest.raises(GroupFailedError, match=words + line) as told:
        await groups_of(batch)
    (note,) = told.value.__notes__
    assert note.startswith("In the environment of s:\nTraceback")
    assert 'raise ValueError("unlucky")' in note
    assert stack.keys_of(batch.id) == []


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
                # The first groups are back before the last ones are out.
                await stack.happens("published", 12)
                break
    await gone(stack, batch.id, environment)
    assert batch.counts == BatchCounts(12, 3, 0, 9)
    await results_are_gone(stack)


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


async def hanging(*_: Any) -> Any:
    await asyncio.Event().wait()


@within(20)
async def test_a_client_that_closes_begins_nothing_any_more(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that came after all others had been ended had a consumer who waited for ever."""
    resigning, go_on = asyncio.Event(), threading.Event()
    loop, resign = asyncio.get_running_loop(), ClientTransitions.resign

    async def slowly(self: ClientTransitions, shards: Sequence[str]) -> None:
        loop.call_soon_threadsafe(resigning.set)
        await asyncio.to_thread(go_on.wait)
        await resign(self, shards)

    stack.host()
    client = stack.client()
    engine = client._engine  # pyright: ignore[reportPrivateUsage]
    await client.__aenter__()
    monkeypatch.setattr(ClientTransitions, "resign", slowly)
    monkeypatch.setattr(ClientTransitions, "open", hanging)
    closing = asyncio.create_task(client.close())
    await resigning.wait()
    with pytest.raises(ClosedError, match="this client is closed; make a new one"):
        client.run_groups(rows_of(2), 2)
    with pytest.raises(ClosedError, match="this client is closed; make a new one"):
        await client.resume("0123456789ab")
    # Who had looked just before it began to close.
    monkeypatch.setattr(engine, "start", lambda: engine._ready)  # pyright: ignore[reportPrivateUsage]
    late = asyncio.create_task(groups_of(client.run_groups(rows_of(2), 2)))
    await until(lambda: engine.sessions.sessions)
    go_on.set()
    with pytest.raises(ClosedError, match="was closed meanwhile"):
        await late
    await closing


@within(20)
@pytest.mark.parametrize("is_told", [True, False])
async def test_an_operators_cancellation_is_told_with_its_reason(stack: Stack, is_told: bool) -> None:
    """Also where its word finds no results stream, because somebody deleted it."""
    from rolloutbus.broker.channel import Link

    environment = EachRow(Gates().rollout)
    await stack.worker(environment)
    client = await stack.connected()
    async with client.run_groups(rows_of(3), 2) as batch:
        await stack.happens("taken", 3)
        link = Link(BrokerSettings(url=stack.broker.url), "operator")
        if not is_told:
            await link.run([("DEL", stack.keys.results("trainer", "s"))])
        assert await cancel_batch(link, stack.keys, batch.id, "trainer", ["s"], "too dear") == 3
        await link.close()
        with pytest.raises(BatchCancelledError, match="cancelled by an operator: too dear"):
            await groups_of(batch)
    await gone(stack, batch.id, environment)


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
async def test_leaving_waits_for_no_broker_that_is_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for reconnect_timeout_s, five minutes, and Ctrl-C on a job with it; then a stack was printed."""
    told: list[dict[str, Any]] = []

    def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        told.append(context)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", tell)
    with EmbeddedBroker() as broker:
        async with stack_on(broker, reconnect_timeout_s=60.0, command_timeout_s=15.0) as stack:
            stack.host()
            client = stack.client()
            async with client.run_groups(rows_of(2), 2):
                await stack.happens("published", 2)
                broker.kill()
                await asyncio.sleep(0.5)
                left = time.monotonic()
            assert "there the batch is cancelled later, or expires" in caplog.text
            await client.close()
            assert time.monotonic() - left < 10
            assert told == []
            broker.restart()

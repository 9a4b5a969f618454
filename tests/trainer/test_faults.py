"""First faults, on real processes: every row is accepted once, the books balance, and nothing waits."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.client_transitions import cancel_batch
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import BatchCancelledError
from rolloutbus.shard_workers.worker import CLAIM_EVERY_S
from rolloutbus.trainer import Batch, BatchCounts, CompletedGroup

from tests.stacks import (
    QUICK,
    EachRow,
    Gates,
    Pace,
    Row,
    Stack,
    check_groups,
    groups_of,
    rows_of,
    stack_on,
    until,
    within,
)


def stale(batch: Batch[Any]) -> float:
    return batch.metrics["timing/rollout/stale_writes"]


@within(30)
async def test_a_worker_killed_in_the_middle_of_a_group_costs_no_row(stack: Stack) -> None:
    stack.host({"s": {"replicas": 2}})
    doomed = await stack.process(label="s/0", hold=True)
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2) as batch:
        await stack.happens("taken", 4)
        await doomed.event("row", row=0)
        doomed.tell("go", 0)
        # One row of group 0 is in the broker, the other dies with its process.
        await stack.happens("accepted", 1, group=0)
        await doomed.kill()
        await stack.worker(label="s/1")
        groups = await groups_of(batch)
    check_groups(groups, 4)
    (torn,) = [group for group in groups if group.group_index == 0]
    assert isinstance(torn, CompletedGroup)
    assert torn.origins == [("s/0", 1), ("s/1", 2)]
    assert batch.counts == BatchCounts(4, 4, 0, 0)
    assert batch.metrics["timing/rollout/redeliveries"] == 4


@within(30)
async def test_a_worker_stopped_past_its_lease_has_its_writes_refused_and_counted(broker: EmbeddedBroker) -> None:
    # Renewed seldom, so that the stopped process writes before it hears that it has lost.
    async with stack_on(broker, lease_s=2.0, renew_every_s=1.5) as stack:
        stack.host({"s": {"replicas": 2}})
        zombie = await stack.process(label="s/0", hold=True)
        client = await stack.connected()
        async with client.run_groups(rows_of(2), 2) as batch:
            for _ in range(4):
                await zombie.event("row")
            zombie.pause()
            zombie.tell("go")
            other = await stack.worker(label="s/1", slots=1)
            first = await anext(batch)
            await stack.happens("finished", 2, instance="s/1")
            assert other.statistics().ended.get("done", 0) >= 1
            zombie.go_on()
            await stack.happens("refused", 1, instance="s/0")
            groups = [first, *await groups_of(batch)]
        check_groups(groups, 2)
        assert {origin for group in groups for origin in group.origins} == {("s/1", 2)}  # pyright: ignore
        assert stale(batch) >= 1
        assert batch.metrics["timing/rollout/duplicate_rows"] == 0
        assert batch.counts == BatchCounts(2, 2, 0, 0)


@within(30)
async def test_a_results_stream_that_somebody_deleted_costs_one_attempt_of_what_runs(stack: Stack) -> None:
    """Every attempt was lost, until the group had none left and was said to have killed its instances."""
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(2), 2) as batch:
        await stack.happens("taken", 2)
        stack.redis.delete(stack.keys.results("trainer", "s"))
        gates.open(0)
        await until(lambda: stack.redis.exists(stack.keys.results("trainer", "s")))
        gates.open(1)
        groups = await groups_of(batch)
    check_groups(groups, 2)
    assert batch.counts == BatchCounts(2, 2, 0, 0)


@asynccontextmanager
async def mortal_stack(directory: Path, persistence: Any, **settings: Any) -> AsyncGenerator[Stack]:
    """A stack on a broker of its own, which the test kills."""
    with EmbeddedBroker(directory=directory, persistence=persistence) as broker:
        async with stack_on(broker, **settings) as stack:
            stack.host()
            yield stack


def cut_file(directory: Path, share: float) -> None:
    """Take the end of the append-only file away, as a machine that lost power would: inside of a command, too."""
    newest = append_only_file(directory)
    os.truncate(newest, int(newest.stat().st_size * share))


def cut_before_group(directory: Path, number: int) -> None:
    """Cut the append-only file where the `number`-th group was published, so that it and what came later is lost."""
    newest = append_only_file(directory)
    published = re.finditer(rb"queued 0 - - - ", newest.read_bytes())
    os.truncate(newest, next(itertools.islice(published, number, None)).start())


def append_only_file(directory: Path) -> Path:
    return sorted(directory.glob("**/*.incr.aof"))[-1]


@pytest.mark.parametrize("persistence", ["always", "everysec"])
@within(60)
async def test_a_broker_killed_and_restarted_with_its_file_loses_nothing(tmp_path: Path, persistence: str) -> None:
    async with mortal_stack(tmp_path, persistence) as stack:
        pace = Pace(free=20)
        await stack.worker(EachRow(pace.rollout))
        client = await stack.connected()
        async with client.run_groups(rows_of(30), 2) as batch:
            groups = [await anext(batch) for _ in range(5)]
            stack.broker.kill()
            stack.broker.restart()
            stack.host()
            pace.go.set()
            groups += await groups_of(batch)
        check_groups(groups, 30)
        assert batch.counts == BatchCounts(30, 30, 0, 0)


@pytest.mark.parametrize("share", [0.95, 0.8, 0.5, 0.2])
@within(60)
async def test_a_broker_that_lost_the_end_of_its_file_gets_what_is_missing_again(tmp_path: Path, share: float) -> None:
    async with mortal_stack(tmp_path, "everysec") as stack:
        pace = Pace(free=20)
        await stack.worker(EachRow(pace.rollout))
        client = await stack.connected()
        async with client.run_groups(rows_of(30), 2) as batch:
            groups = [await anext(batch) for _ in range(5)]
            stack.broker.kill()
            cut_file(tmp_path, share)
            stack.broker.restart()
            stack.host()
            pace.go.set()
            groups += await groups_of(batch)
        check_groups(groups, 30)
        assert batch.counts == BatchCounts(30, 30, 0, 0)
        await results_and_queue_are_empty(stack)


@pytest.mark.parametrize("number", [1, 5, 15])
@within(60)
async def test_a_broker_that_lost_groups_whose_end_the_trainer_has_seen_is_not_asked_for_them(
    tmp_path: Path, number: int
) -> None:
    """It never held as many groups again as the batch has, so the batch could not be sealed, and failed."""
    async with mortal_stack(tmp_path, "everysec") as stack:
        pace = Pace(free=40)
        await stack.worker(EachRow(pace.rollout))
        client = await stack.connected()
        async with client.run_groups(rows_of(30), 2) as batch:
            groups = [await anext(batch) for _ in range(20)]
            await stack.happens("taken", 30)
            stack.broker.kill()
            cut_before_group(tmp_path, number)
            stack.broker.restart()
            stack.host()
            pace.go.set()
            groups += await groups_of(batch)
        check_groups(groups, 30)
        assert batch.counts == BatchCounts(30, 30, 0, 0)
        await results_and_queue_are_empty(stack)


async def results_and_queue_are_empty(stack: Stack) -> None:
    async with asyncio.timeout(10):
        await until(lambda: stack.redis.xlen(stack.keys.results("trainer", "s")) == 0)
        await until(lambda: stack.redis.xlen(stack.keys.groups("s")) == 0)


@within(60)
async def test_a_broker_that_lost_everything_gets_the_missing_groups_again(tmp_path: Path) -> None:
    async with mortal_stack(tmp_path, "none") as stack:
        pace = Pace(free=20)
        await stack.worker(EachRow(pace.rollout))
        client = await stack.connected()
        async with client.run_groups(rows_of(30), 2) as batch:
            groups = [await anext(batch) for _ in range(5)]
            stack.broker.kill()
            stack.broker.restart()
            stack.host()
            pace.go.set()
            groups += await groups_of(batch)
        check_groups(groups, 30)
        assert batch.counts == BatchCounts(30, 30, 0, 0)
        await results_and_queue_are_empty(stack)


@within(60)
async def test_a_broker_that_loses_everything_twice_does_not_end_the_batch(tmp_path: Path) -> None:
    async with mortal_stack(tmp_path, "none") as stack:
        pace = Pace(free=4)
        await stack.worker(EachRow(pace.rollout))
        client = await stack.connected()
        async with client.run_groups(rows_of(10), 2) as batch:
            groups = [await anext(batch) for _ in range(2)]
            for _ in range(2):
                stack.broker.kill()
                stack.broker.restart()
                stack.host()
            pace.go.set()
            groups += await groups_of(batch)
        check_groups(groups, 10)


@within(60)
async def test_a_broker_that_loses_everything_in_the_middle_of_publishing_gets_the_whole_batch(tmp_path: Path) -> None:
    async with mortal_stack(tmp_path, "none", max_queued_bytes=20_000) as stack:
        pace = Pace(free=2)
        worker = await stack.worker(EachRow(pace.rollout), slots=2)
        client = await stack.connected()
        async with client.run_groups(rows_of(60, text="x" * 2000), 2) as batch:
            groups = [await anext(batch)]
            await until(lambda: "bytes queued" in batch.waiting_for)
            stack.broker.kill()
            stack.broker.restart()
            stack.host()
            pace.go.set()
            groups += await groups_of(batch)
        check_groups(groups, 60)
        assert worker.statistics().ended.get("error", 0) == 0


@within(60)
async def test_workers_in_their_own_processes_outlive_the_broker_too(tmp_path: Path) -> None:
    async with mortal_stack(tmp_path, "everysec") as stack:
        stack.host({"s": {"replicas": 2}})
        workers = [await stack.process(label=f"s/{at}", hold=True, slots=4) for at in range(2)]
        client = await stack.connected()
        async with client.run_groups(rows_of(16), 2) as batch:
            await stack.happens("taken", 8)
            stack.broker.kill()
            stack.broker.restart()
            for worker in workers:
                worker.tell("go")
            check_groups(await groups_of(batch), 16)
        assert batch.counts == BatchCounts(16, 16, 0, 0)


@within(60)
async def test_a_batch_that_begins_while_the_broker_is_away_goes_through(tmp_path: Path) -> None:
    """The sweeper found no batch before it was opened, and ended it as gone."""
    async with mortal_stack(tmp_path, "everysec") as stack:
        await stack.worker()
        client = await stack.connected()
        stack.broker.kill()
        beginning = asyncio.create_task(asyncio.to_thread(client.run_groups, rows_of(5), 2))
        await asyncio.sleep(1.0)
        stack.broker.restart()
        async with await beginning as batch:
            check_groups(await groups_of(batch), 5)


@within(30)
async def test_a_batch_that_begins_while_the_broker_hangs_does_not_hold_the_callers_loop_up(tmp_path: Path) -> None:
    """It used to wait for the broker's answer, and with it every other task of a trainer that has one event loop."""
    with EmbeddedBroker(directory=tmp_path / "broker") as broker:
        async with stack_on(broker) as stack:
            stack.host()
            await stack.worker()
            client = await stack.connected()
            assert broker.pid is not None
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                batch = client.run_groups(rows_of(4), 2)
                took = time.monotonic() - began
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            async with batch:
                check_groups(await groups_of(batch), 4)
    assert took < QUICK["command_timeout_s"] / 10


@within(60)
async def test_a_trainer_that_pauses_keeps_the_brokers_bytes_bounded_and_loses_nothing(broker: EmbeddedBroker) -> None:
    bound = 200_000

    async def rollout(row: Row) -> Row:
        return {"row": row["_rowidx"], "text": "x" * 10_000}

    async with stack_on(broker, max_unread_bytes=bound, max_queued_bytes=bound) as stack:
        stack.host()
        await stack.worker(EachRow(rollout), slots=2)
        client = await stack.connected()
        async with client.run_groups(rows_of(200, text="y" * 10_000), 2) as batch:
            groups = [await anext(batch) for _ in range(3)]
            for _ in range(3):
                await quiet(stack, batch.id)
                unread, queued = bytes_of(stack, batch.id)
                assert bound <= unread <= bound + 2 * 2 * 10_500
                assert queued <= 2 * bound + 2 * 10_500
                groups += [await anext(batch) for _ in range(20)]
            groups += await groups_of(batch)
        check_groups(groups, 200)
        assert batch.counts == BatchCounts(200, 200, 0, 0)


@within(30)
async def test_a_batch_that_an_operator_cancelled_does_not_come_to_life_when_the_broker_loses_its_data() -> None:
    with EmbeddedBroker() as broker:
        async with stack_on(broker) as stack:
            stack.host()
            environment = EachRow(Gates().rollout)
            worker = await stack.worker(environment)
            client = await stack.connected()
            engine, batch = client._engine, client.run_groups(rows_of(3), 2)  # pyright: ignore[reportPrivateUsage]
            await stack.happens("taken", 3)
            cancelling = engine.call(cancel_batch(engine.link, stack.keys, batch.id, "trainer", ["s"], "why"))
            assert await asyncio.wrap_future(cancelling) == 3
            session = engine.sessions.sessions[batch.id]
            await until(lambda: session.has_failed)
            before = engine.link.current
            await asyncio.to_thread(broker.restart)
            collector = engine.collector
            await until(lambda: engine.link.current not in (None, before) and collector._run_id != session.run_id)  # pyright: ignore[reportPrivateUsage]
            engine.sessions.look_after(session)
            assert session.publishing is not None
            assert session.publishing.done()
            with pytest.raises(BatchCancelledError, match="why"):
                await groups_of(batch)
            assert stack.keys_of(batch.id) == []
            await stack.reading("s", worker.identity.consumer)


@within(60)
async def test_groups_that_wait_for_room_go_on_soon_after_there_is_some(broker: EmbeddedBroker) -> None:
    """Each was put aside right after the worker had looked for such groups, and waited for its next look."""

    async def rollout(row: Row) -> Row:
        return {"row": row["_rowidx"], "text": "x" * 1000}

    async with stack_on(broker, max_unread_bytes=1, max_queued_bytes=1) as stack:
        stack.host()
        await stack.worker(EachRow(rollout))
        client = await stack.connected()
        began = time.monotonic()
        async with client.run_groups(rows_of(20, text="y" * 1000), 2) as batch:
            async for _ in batch:
                # Longer than it takes until the next group is put aside, and shorter than a look finds it waiting.
                await asyncio.sleep(0.1)
        assert batch.counts == BatchCounts(20, 20, 0, 0)
        assert time.monotonic() - began < 20 * CLAIM_EVERY_S / 2


def bytes_of(stack: Stack, batch: str) -> tuple[int, int]:
    unread, queued = stack.redis.hmget(stack.keys.batch(batch), "unread_bytes", "queued_bytes:s")
    return int(unread or 0), int(queued or 0)


async def quiet(stack: Stack, batch: str) -> None:
    """Return when nothing moves any more: the trainer has not asked, and all bounds are reached."""
    before: Sequence[int] = ()
    while (now := bytes_of(stack, batch)) != before:
        before = now
        await asyncio.sleep(0.3)

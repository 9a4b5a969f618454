"""A batch that goes on in another process, or is asked for where it is open already."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.client_transitions import ClientTransitions
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import RouteError, RowError, UnknownBatchError, UsageError
from rolloutbus.broker.messages import ForeignEntryError
from rolloutbus.collector import Collector
from rolloutbus.trainer import BatchCounts, CompletedGroup, GroupFailure, RolloutClient

from tests.stacks import (
    ROOT,
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


class Trainer:
    """A trainer in a process of its own (tests/trainer_program.py)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the trainer ended early"
        return json.loads(line)


@asynccontextmanager
async def trainer(stack: Stack, take: int) -> AsyncGenerator[Trainer]:
    order = {"url": stack.broker.url, "run": stack.run, "settings": stack.options, "groups": 10, "take": take}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.trainer_program", json.dumps(order),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        yield Trainer(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.communicate()


@pytest.mark.parametrize("known_rows", [True, False])
@within(60)
async def test_a_batch_goes_on_in_a_new_process_after_its_trainer_was_killed(stack: Stack, known_rows: bool) -> None:
    ran: list[int] = []
    pace = Pace(free=12)

    async def rollout(row: Row) -> Row:
        result = await pace.rollout(row)
        ran.append(row["_rowidx"])
        return result

    await stack.worker(EachRow(rollout))
    async with trainer(stack, take=4) as first:
        batch_id = (await first.event())["batch"]
        taken = [(await first.event())["group"] for _ in range(4)]
        # It asked for the fifth, so the first three are acknowledged at least; and only what is sealed can be resumed.
        await until(lambda: is_sealed(stack, batch_id) and handed(stack, batch_id) >= 3)
        acknowledged = [group for group in taken if record(stack, batch_id, group)[0] == "handed"]
        first.process.kill()
        await first.process.wait()
    await stack.happens("finished", 6)
    client = await stack.connected(name_wait_s=10.0)
    rows = rows_of(10)
    for at, row in enumerate(rows):
        row["_rowidx"] = at
    async with await client.resume(batch_id, rows if known_rows else None) as batch:
        pace.go.set()
        groups = await groups_of(batch)
    assert sorted([*acknowledged, *(group.group_index for group in groups)]) == list(range(10))
    assert sorted(ran) == list(range(20))
    assert all(row["_rowidx"] == result["row"] for g in groups for row, result in zip(g.rows, g.results, strict=True))  # pyright: ignore
    assert batch.counts == BatchCounts(10, 10, 0, 0)


def record(stack: Stack, batch: str, group: int) -> list[str]:
    return stack.redis.hget(stack.keys.batch(batch), f"g:{group}").decode().split(" ")  # pyright: ignore


def is_sealed(stack: Stack, batch: str) -> bool:
    return stack.redis.hget(stack.keys.batch(batch), "state") == b"sealed"


def handed(stack: Stack, batch: str) -> int:
    return [record(stack, batch, group)[0] for group in range(10)].count("handed")


@within(60)
async def test_a_failure_that_was_handed_over_does_not_come_again_after_a_restart(stack: Stack) -> None:
    go = asyncio.Event()

    async def rollout(row: Row) -> Row:
        if row["_rowidx"] // 2 == 0:
            raise ValueError("unlucky")
        await go.wait()
        return {"row": row["_rowidx"]}

    await stack.worker(EachRow(rollout), data_attempts=1)
    async with trainer(stack, take=9) as first:
        batch_id = (await first.event())["batch"]
        assert (await first.event())["group"] == 0
        await until(lambda: record(stack, batch_id, 0)[2] == "told" and is_sealed(stack, batch_id))
        first.process.kill()
        await first.process.wait()
    client = await stack.connected(name_wait_s=10.0)
    async with await client.resume(batch_id, on_failure="yield") as batch:
        go.set()
        groups = await groups_of(batch)
    assert sorted(group.group_index for group in groups) == list(range(1, 10))
    assert batch.counts == BatchCounts(10, 9, 1, 0)


@within(60)
async def test_a_batch_that_is_resumed_while_the_broker_restarts_is_looked_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody was told of the restart, because nothing had been read yet, and its groups waited without a word."""
    with EmbeddedBroker(directory=tmp_path, persistence="always") as broker:
        async with stack_on(broker, no_instance_timeout_s=1.0, sweep_every_s=0.2) as stack:
            stack.host()
            batch_id = await left_by_a_killed_trainer(stack)
            client = await stack.connected(name_wait_s=10.0)
            adopt = ClientTransitions.adopt

            async def restarted_meanwhile(steps: ClientTransitions, batch: str) -> None:
                monkeypatch.setattr(ClientTransitions, "adopt", adopt)
                await asyncio.to_thread(broker.restart)
                await adopt(steps, batch)

            monkeypatch.setattr(ClientTransitions, "adopt", restarted_meanwhile)
            async with await client.resume(batch_id, rows_of(10), on_failure="yield") as batch:
                groups = await groups_of(batch)
            assert {group.type for group in groups if isinstance(group, GroupFailure)} == {"NoInstanceError"}
            assert len(groups) == 10
            stack.redis.xtrim(stack.keys.groups("s"), maxlen=0)


async def left_by_a_killed_trainer(stack: Stack) -> str:
    """The id of a sealed batch of client `trainer`, which is not there any more."""
    async with trainer(stack, take=1) as first:
        batch_id = (await first.event())["batch"]
        await until(lambda: is_sealed(stack, batch_id))
        first.process.kill()
        await first.process.wait()
    return batch_id


@within(60)
async def test_a_batch_of_which_a_broker_lost_what_had_ended_goes_on_too() -> None:
    """Its record named fewer groups than it was laid out with, and was taken for one that somebody had changed."""
    with EmbeddedBroker() as broker:
        async with stack_on(broker) as stack:
            pace = Pace(free=12)
            stack.host()
            await stack.worker(EachRow(pace.rollout))
            async with trainer(stack, take=4) as first:
                batch_id = (await first.event())["batch"]
                taken = {(await first.event())["group"] for _ in range(4)}
                await stack.happens("finished", 6)
                await until(lambda: is_sealed(stack, batch_id) and handed(stack, batch_id) >= 3)
                broker.kill()
                broker.restart()
                stack.host()
                await until(lambda: is_sealed(stack, batch_id))
                # Handed over, or come and not handed over: the results of those die with the trainer.
                known = [record(stack, batch_id, group) for group in range(10)]
                first.process.kill()
                await first.process.wait()
            client = await stack.connected(name_wait_s=10.0)
            async with await client.resume(batch_id, on_failure="yield") as batch:
                pace.go.set()
                groups = await groups_of(batch)
            done = {at for at, words in enumerate(known) if words[0] == "done"}
            failed = {group.group_index: group.type for group in groups if isinstance(group, GroupFailure)}
            came = {group.group_index for group in groups if isinstance(group, CompletedGroup)}
            assert failed == dict.fromkeys(done, "ResultsLostError")
            assert came.isdisjoint(done)
            assert taken | came | done == set(range(10))
            assert len(groups) == len(came) + len(done)
            assert batch.counts == BatchCounts(10, 10 - len(done), len(done), 0)


@within(30)
async def test_a_failure_that_is_found_after_a_resume_without_rows_arrives(broker: EmbeddedBroker) -> None:
    """It stood on the stream with no rows, was set aside as foreign, and the batch ended with another error."""
    async with stack_on(broker, no_instance_timeout_s=1.0) as stack:
        stack.host()
        batch_id = await left_by_a_killed_trainer(stack)
        client = await stack.connected(name_wait_s=10.0)
        async with await client.resume(batch_id, on_failure="yield") as batch:
            groups = await groups_of(batch)
        failures = {(group.type, tuple(group.row_indices)) for group in groups if isinstance(group, GroupFailure)}
        assert failures == {("NoInstanceError", (2 * at, 2 * at + 1)) for at in range(10)}
        # What was queued waits for an instance, which will drop it.
        stack.redis.xtrim(stack.keys.groups("s"), maxlen=0)


async def resumed(client: RolloutClient, batch_id: str) -> int:
    async with await client.resume(batch_id) as batch:
        return len(await groups_of(batch))


@within(20)
async def test_a_batch_that_is_open_here_cannot_be_resumed_and_goes_on_undisturbed(stack: Stack) -> None:
    """The second one took its place, and whoever iterated over the first one waited for ever."""
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2) as batch:
        gates.open(0)
        first = await anext(batch)
        await until(lambda: is_sealed(stack, batch.id))
        for _ in range(2):
            with pytest.raises(UsageError, match=f"batch {batch.id} is open in this client already; go on with"):
                await client.resume(batch.id)
        gates.open(1, 2, 3)
        check_groups([first, *await groups_of(batch)], 4)
    assert batch.counts == BatchCounts(4, 4, 0, 0)
    assert stack.keys_of(batch.id) == []


@within(30)
async def test_of_two_who_resume_a_batch_at_once_one_has_it(stack: Stack) -> None:
    batch_id = await left_by_a_killed_trainer(stack)
    await stack.worker()
    client = await stack.connected(name_wait_s=10.0)
    outcomes = await asyncio.gather(*(resumed(client, batch_id) for _ in range(3)), return_exceptions=True)
    assert outcomes.count(10) == 1
    assert [type(outcome) for outcome in outcomes].count(UsageError) == 2


@pytest.mark.parametrize(("kind", "step"), [(ClientTransitions, "adopt"), (Collector, "attach")])
@within(30)
async def test_a_resume_that_was_given_up_can_be_repeated(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, kind: type[Any], step: str
) -> None:
    batch_id = await left_by_a_killed_trainer(stack)
    client = await stack.connected(name_wait_s=10.0)
    reached = asyncio.Event()
    loop, take = asyncio.get_running_loop(), getattr(kind, step)

    async def take_and_never_return(*words: Any, **options: Any) -> None:
        await take(*words, **options)
        loop.call_soon_threadsafe(reached.set)
        await asyncio.Event().wait()

    monkeypatch.setattr(kind, step, take_and_never_return)
    resuming = asyncio.create_task(client.resume(batch_id))
    await reached.wait()
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resuming
    monkeypatch.undo()
    await stack.worker()
    assert await resumed(client, batch_id) == 10


@within(30)
async def test_a_resume_given_up_at_its_very_end_can_be_repeated_with_all_its_results(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch was open and nobody had it; what had come of it by then must come again."""
    batch_id = await left_by_a_killed_trainer(stack)
    await stack.worker()
    await stack.happens("finished", 10)
    client = await stack.connected(name_wait_s=10.0)
    wrap_future = asyncio.wrap_future

    def lose(future: Future[Any]) -> asyncio.Future[Any]:
        """What is under way ends, and its waiter is cancelled before it is told."""
        if future.done():
            return wrap_future(future)
        future.result(10)
        while not client._engine.sessions.sessions[batch_id].collection.all_ended:  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.01)
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiter.cancel()
        return waiter

    monkeypatch.setattr(asyncio, "wrap_future", lose)
    with pytest.raises(asyncio.CancelledError):
        await client.resume(batch_id)
    monkeypatch.undo()
    assert await resumed(client, batch_id) == 10


@within(30)
async def test_rows_that_were_read_again_are_stamped_again(stack: Stack) -> None:
    """They came without `_rowidx`, which a step missed only when it had to go on after a crash."""
    batch_id = await left_by_a_killed_trainer(stack)
    await stack.worker()
    client = await stack.connected(name_wait_s=10.0)
    rows = rows_of(10)
    with pytest.raises(RowError, match="row 0 says that it is row 19; give the rows in the order"):
        await client.resume(batch_id, [{**row, "_rowidx": 19 - at} for at, row in enumerate(rows)])
    for wrong in ("0", True, [0]):
        with pytest.raises(RowError, match="row 0 says that it is row"):
            await client.resume(batch_id, [{**rows[0], "_rowidx": wrong}, *rows[1:]])
    with pytest.raises(RowError, match="rows 0 and 1 are one and the same dict"):
        await client.resume(batch_id, [rows[0], rows[0], *rows[2:]])
    with pytest.raises(RouteError, match="row 3: the row has no route"):
        await client.resume(batch_id, [*rows[:3], {"responses_create_params": {}}, *rows[4:]])
    with pytest.raises(UsageError, match="has 20 rows, but 19 were given"):
        await client.resume(batch_id, rows[1:])
    # Another dataset of the same size would be trained on with this one's results.
    with pytest.raises(UsageError, match=r"row 7 of batch \w+ was published for route .* goes to 'x'"):
        await client.resume(batch_id, [*rows[:7], {**rows[7], "agent_ref": {"name": "x"}}, *rows[8:]])
    for other in ({**rows[7], "more": 1}, {**rows[7], "responses_create_params": {"input": "another"}}):
        with pytest.raises(UsageError, match=rf"rows 6 to 7 of batch {batch_id} are not what was published"):
            await client.resume(batch_id, [*rows[:7], other, *rows[8:]])
    async with await client.resume(batch_id, rows) as batch:
        groups = await groups_of(batch)
    given = {
        group.group_index: [row["_rowidx"] for row in group.rows]
        for group in groups
        if isinstance(group, CompletedGroup)
    }
    assert given == {at: [2 * at, 2 * at + 1] for at in range(10)}


@within(30)
async def test_another_clients_batch_is_told_as_such_and_left_alone(stack: Stack) -> None:
    """It said that another process held the name."""
    batch_id = await left_by_a_killed_trainer(stack)
    other = await stack.connected(client="validation")
    with pytest.raises(UsageError, match=f"batch {batch_id} belongs to client 'trainer', and this client is 'valid"):
        await other.resume(batch_id)
    await stack.worker()
    assert await resumed(await stack.connected(name_wait_s=10.0), batch_id) == 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("g:0", "running"),
        ("g:0", b"\xff"),
        ("group_size", "0"),
        ("group_size", "3"),
        ("published", "many"),
        ("published", "100000000"),
        ("max_unread_bytes", "x"),
        ("layout", "[1]"),
        ("layout", '[["s", "a", 9]]'),
        ("layout", '[["s", "a", -1], ["s", "a", 11]]'),
        ("layout", "{"),
        ("checksums", "01234567"),
    ],
)
@within(30)
async def test_a_record_that_was_changed_by_hand_is_told_as_such(stack: Stack, field: str, value: str | bytes) -> None:
    batch_id = await left_by_a_killed_trainer(stack)
    stack.redis.hset(stack.keys.batch(batch_id), field, value)
    client = await stack.connected(name_wait_s=10.0)
    with pytest.raises(
        ForeignEntryError, match=f"record of batch {batch_id} was changed .* `rolloutbus cancel {batch_id}`"
    ):
        await client.resume(batch_id)
    stack.strays_expected = True


@within(20)
async def test_closing_a_batch_that_is_closed_or_was_never_begun_is_no_error(stack: Stack) -> None:
    client = await stack.connected()
    batch = client.run_groups(rows_of(2), 2)
    await asyncio.gather(batch.cancel(), batch.cancel())
    await batch.aclose()
    with pytest.raises(UnknownBatchError):
        await client.resume(batch.id)

"""Leases against jobs: late results, double losses, long jobs, blocked event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from rolloutbus.broker import codec
from rolloutbus.broker.channel import Payload
from rolloutbus.broker.messages import frame, parse_group
from rolloutbus.broker.worker_transitions import Acceptance, Accepted, Attempt, Rows, WorkerTransitions

from tests.regressions.arena import Arena, Environment, comes_true, completed, echo, rows_of


async def _take(
    transitions: WorkerTransitions, entries: list[str], token: str, crash_limit: int = 5
) -> tuple[Attempt, str]:
    raw = (await transitions.fetch(entries))[0]
    group = parse_group(*raw)
    taken = await transitions.take(group, token, observing=True, crash_limit=crash_limit)
    return Attempt(group, token, taken.attempt), taken.status


async def _claimed(transitions: WorkerTransitions) -> list[str]:
    """What can be taken over, as soon as there is something."""
    while True:
        found = await transitions.claim(1, observing=True, peers=())
        if found.entries:
            return found.entries
        await asyncio.sleep(0.05)


async def _accept(transitions: WorkerTransitions, attempt: Attempt, value: str) -> str:
    """Finish a group of one row with a result from `value`."""
    payload = Payload.of(codec.encode({"from": value}))
    answer = (await transitions.accept([Acceptance(attempt, [Rows((0,), frame([payload]))], finish=True)]))[0]
    assert isinstance(answer, Accepted), answer
    return answer.status


async def _first_entry(arena: Arena, transitions: WorkerTransitions) -> list[str]:
    """The first group, delivered to this consumer by a blocking read."""
    await transitions.prepare()
    while True:
        reply: Any = await asyncio.to_thread(arena.control.execute_command, *transitions.read_command(1, block_ms=500))
        if reply:
            return [reply[0][1][0][0].decode()]


async def test_a_late_result_of_a_requeued_attempt_is_refused_and_counted(arena: Arena) -> None:
    """A worker hung in a garbage collection for a minute; its job was requeued and run elsewhere. Then the first one
    woke up, delivered its result too, and a group of eight had nine samples. The token of an attempt that lost its
    lease opens nothing.
    """
    late, second = arena.transitions("s/0"), arena.transitions("s/1")
    async with arena.client() as client, client.run_groups(rows_of(1, 1), 1) as batch:
        slow, status = await _take(late, await _first_entry(arena, late), "token-late")
        assert status == "ok"
        fast, status = await _take(second, await _claimed(second), "token-second")
        assert (status, fast.number) == ("ok", 2)
        assert await _accept(late, slow, "late") == "stale"
        assert await _accept(second, fast, "second") == "ok"
        groups = await completed(batch)
    assert [group.results for group in groups] == [[{"from": "second"}]]
    assert batch.metrics["timing/rollout/stale_writes"] == 1


async def test_a_second_loss_during_the_take_over_does_not_block_it(arena: Arena) -> None:
    """A job was lost, and the worker that claimed it was killed between claim and start. The queue had marked the job
    as "being recovered" by a process that was no more, and nobody looked at it again. A claim is only a lease like
    any other.
    """
    first, second, third = (arena.transitions(f"s/{at}") for at in range(3))
    async with arena.client() as client, client.run_groups(rows_of(1, 1), 1) as batch:
        await _take(first, await _first_entry(arena, first), "token-1")
        await _claimed(second)  # and it dies before it takes
        attempt, status = await _take(third, await _claimed(third), "token-3")
        assert status == "ok"
        assert await _accept(third, attempt, "third") == "ok"
        groups = await completed(batch)
    assert groups[0].results == [{"from": "third"}]


async def test_groups_on_their_last_chance_run_one_at_a_time(arena: Arena) -> None:
    """A poison job and seven healthy ones shared a worker. They were lost together, taken over together by the next
    worker, and lost again; after three rounds all eight were in the dead letter queue. What is lost once more is
    buried, so no instance runs two such groups side by side: the innocent one gets through, and the guilty one dies
    alone.
    """
    first, second = arena.transitions("s/0"), arena.transitions("s/1")
    await second.register()
    async with arena.client() as client, client.run_groups(rows_of(2, 1), 1) as batch:
        for at in range(2):
            await _take(first, await _first_entry(arena, first), f"token-{at}")
        lost = [await _claimed(second), await _claimed(second)]
        await second.register()
        one, status = await _take(second, lost[0], "token-2", crash_limit=2)
        _, other = await _take(second, lost[1], "token-3", crash_limit=2)
        assert (status, other) == ("ok", "suspect")
        assert await _accept(second, one, "second") == "ok"
        two, status = await _take(second, await _claimed(second), "token-4", crash_limit=2)
        assert status == "ok"
        assert await _accept(second, two, "second") == "ok"
        groups = await completed(batch)
    assert len(groups) == 2
    assert batch.metrics["timing/rollout/redeliveries"] == 2


async def test_a_job_of_five_leases_is_delivered_once(arena: Arena) -> None:
    """The visibility timeout was half an hour and the longest rollouts took an hour, so each of them ran on every
    worker in turn and finished on none. A lease is renewed for as long as the work goes on, so it says nothing about
    how long a job may take.
    """

    async def slow(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(5 * arena.settings.lease_s)
        return {"row": row["_rowidx"]}

    environments = [Environment(slow), Environment(slow)]
    for at, environment in enumerate(environments):
        arena.worker(f"s/{at}", environment)
    async with arena.client() as client, client.run_groups(rows_of(1, 1), 1) as batch:
        groups = await completed(batch)
    assert len(groups) == 1
    assert sum(len(environment.groups) for environment in environments) == 1
    assert batch.metrics["timing/rollout/redeliveries"] == 0


async def test_a_probe_that_blocks_the_event_loop_delays_no_renewal(arena: Arena) -> None:
    """A health probe did 200 ms of blocking I/O in the event loop that also renewed the leases; under load several
    came together, the leases ran out, and healthy workers lost what they were working on. Here the loop is blocked
    for three leases, and renewals go on from their own thread.
    """
    blocked, other = Environment(lambda row: _block(3 * arena.settings.lease_s, row)), Environment()
    done = threading.Event()

    async def elsewhere() -> None:
        worker = arena.build("s/0", blocked)
        task = asyncio.create_task(worker.run())
        await asyncio.to_thread(done.wait)
        worker.stop()
        await task

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    thread.start()
    try:
        async with arena.client() as client, client.run_groups(rows_of(1, 1), 1) as batch:
            await comes_true(lambda: blocked.groups)
            arena.worker("s/1", other)
            groups = await completed(batch)
    finally:
        done.set()
        await asyncio.to_thread(thread.join)
    assert [origin.instance for origin in groups[0].origins] == ["s/0"]
    assert other.groups == []


def _block(seconds: float, row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(seconds)
    return echo(row)

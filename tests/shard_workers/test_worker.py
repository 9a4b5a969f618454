"""The worker loop: retries and budgets, what runs again, who takes which group, and how an instance leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from rolloutbus.broker.errors import GroupFailedError
from rolloutbus.shard_workers.worker import ShardWorker
from rolloutbus.trainer import BatchCounts, CompletedGroup, GroupFailure

from tests.stacks import EachRow, Row, Stack, WholeGroup, check_groups, groups_of, rows_of, until, within


class StatusError(Exception):
    """An HTTP client's error."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        super().__init__(f"HTTP {status_code}")


class Failing:
    """Rollouts that fail `times` times with an error for each row, then succeed."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left = Counter[int]()
        self._times, self._error = times, error

    async def rollout(self, row: Row) -> Row:
        self.left[row["_rowidx"]] += 1
        if self.left[row["_rowidx"]] <= self._times:
            raise self._error
        return {"row": row["_rowidx"]}


async def outcome_of(stack: Stack, groups: int = 1, **options: Any) -> tuple[list[Any], Any]:
    client = await stack.connected()
    async with client.run_groups(rows_of(groups), 2, on_failure="yield", **options) as batch:
        return await groups_of(batch), batch


@within(20)
async def test_an_infra_failure_is_tried_again_and_then_succeeds(stack: Stack) -> None:
    await stack.worker(EachRow(Failing(1, ConnectionError("reset")).rollout))
    groups, batch = await outcome_of(stack)
    check_groups(groups, 1)
    assert groups[0].origins[0].attempt > 1
    assert batch.metrics["timing/rollout/retries"] >= 1
    assert batch.counts == BatchCounts(1, 1, 0, 0)


@within(20)
async def test_an_infra_failure_has_five_attempts(stack: Stack) -> None:
    environment = WholeGroup(failing_with(StatusError(503)))
    await stack.worker(environment)
    (failure,), batch = await outcome_of(stack)
    assert (failure.failure_class, failure.http_status, failure.attempt, failure.type) == (
        "infra",
        503,
        5,
        "StatusError",
    )
    assert len(environment.calls) == 5
    assert batch.metrics["timing/rollout/retries"] == 4
    assert batch.metrics["timing/rollout/dead_groups"] == 1


@within(20)
async def test_a_data_failure_has_two_attempts_and_then_a_dead_letter_with_all_of_it(stack: Stack) -> None:
    environment = WholeGroup(failing_with(StatusError(404)))
    await stack.worker(environment)
    (failure,), batch = await outcome_of(stack)
    assert (failure.failure_class, failure.http_status, failure.attempt) == ("data", 404, 2)
    assert "StatusError" in failure.traceback
    assert len(environment.calls) == 2
    ((_, letter),) = stack.redis.xrange(stack.keys.dead)
    assert letter[b"batch"].decode() == batch.id
    assert letter[b"payload"]


@within(20)
async def test_a_data_failure_raises_where_the_caller_did_not_ask_for_it(stack: Stack) -> None:
    await stack.worker(WholeGroup(failing_with(ValueError("no reward"))))
    client = await stack.connected()
    with pytest.raises(GroupFailedError, match=r"attempt 2: ValueError: no reward"):
        async with client.run_groups(rows_of(1), 2) as batch:
            await groups_of(batch)


def failing_with(error: Exception) -> Any:
    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        raise error
        yield

    return behaviour


@within(20)
async def test_a_retry_avoids_the_instance_that_failed_while_another_is_alive(stack: Stack) -> None:
    stack.host({"s": {"replicas": 2}})
    bad = WholeGroup(failing_with(ConnectionError("no GPU here")))
    await stack.worker(bad, label="s/0")
    good = EachRow()
    await stack.worker(good, label="s/1")
    groups, _ = await outcome_of(stack, 6)
    check_groups(groups, 6)
    assert len(bad.calls) > 0
    assert Counter(tuple(call) for call in bad.calls).most_common(1)[0][1] == 1
    assert {origin.instance for group in groups for origin in group.origins} == {"s/1"}


@within(20)
async def test_a_redelivered_group_runs_whole_and_rows_accepted_before_stay_as_they_are(stack: Stack) -> None:
    runs = Counter[int]()

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        for row in rows:
            runs[row["_rowidx"]] += 1
        yield rows[0], {"row": rows[0]["_rowidx"], "run": runs[rows[0]["_rowidx"]]}
        if runs[0] == 1:
            await stack.happens("accepted", 1)
            raise ConnectionError("half way")
        yield rows[1], {"row": rows[1]["_rowidx"], "run": runs[rows[1]["_rowidx"]]}

    await stack.worker(WholeGroup(behaviour))
    groups, _ = await outcome_of(stack)
    assert runs == {0: 2, 1: 2}
    assert [result["run"] for result in groups[0].results] == [1, 2]
    assert [origin.attempt for origin in groups[0].origins] == [1, 2]


@within(20)
async def test_with_independent_rows_only_what_is_missing_runs_again(stack: Stack) -> None:
    failing = Counter[int]()

    async def rollout(row: Row) -> Any:
        failing[row["_rowidx"]] += 1
        if row["_rowidx"] == 1 and failing[1] == 1:
            return TimeoutError("slow model")
        return {"row": row["_rowidx"]}

    environment = EachRow(rollout)
    await stack.worker(environment, rerun="missing")
    groups, _ = await outcome_of(stack)
    check_groups(groups, 1)
    assert failing == {0: 1, 1: 2}
    assert [origin.attempt for origin in groups[0].origins] == [1, 2]


@pytest.mark.parametrize("rerun", ["missing", "group"])
@within(20)
async def test_rows_that_finish_with_the_failure_of_another_are_no_refused_writes(stack: Stack, rerun: str) -> None:
    """They were still on their way when the failure was reported, came after it, and were refused: run again, and
    counted as writes of an attempt that had lost its lease.
    """
    runs = Counter[int]()

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        for row in rows:
            runs[row["_rowidx"]] += 1
            late = row["_rowidx"] % 2 and runs[row["_rowidx"]] == 1
            yield row, TimeoutError("slow model") if late else {"row": row["_rowidx"]}

    await stack.worker(WholeGroup(behaviour), rerun=rerun, slots=8)
    groups, batch = await outcome_of(stack, 40)
    check_groups(groups, 40)
    assert batch.metrics["timing/rollout/stale_writes"] == 0
    assert batch.metrics["timing/rollout/retries"] == 40
    if rerun == "missing":
        assert runs == {row: 1 + row % 2 for row in range(80)}
        assert {tuple(origin.attempt for origin in group.origins) for group in groups} == {(1, 2)}


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


@within(20)
async def test_a_retry_that_waits_for_the_only_slot_gets_it(stack: Stack) -> None:
    """The reader that was woken beside it went to sleep at the broker, and the retry stayed where it was."""
    failing = Failing(2, ConnectionError("reset"))
    await stack.worker(EachRow(failing.rollout), slots=1)
    groups, _ = await outcome_of(stack, 20)
    check_groups(groups, 20)


@within(30)
async def test_a_retry_that_is_due_is_not_overtaken_by_all_that_was_published_before(stack: Stack) -> None:
    """The reader took each place that came free, and what failed once waited for the whole backlog to end."""
    order: list[int] = []

    async def rollout(row: Row) -> Row:
        order.append(row["_rowidx"])
        if order.count(0) == 1 and row["_rowidx"] == 0:
            raise ConnectionError("reset")
        await asyncio.sleep(0.02)
        return {"row": row["_rowidx"]}

    await stack.worker(EachRow(rollout), slots=1)
    groups, _ = await outcome_of(stack, 150)
    check_groups(groups, 150)
    assert order.index(0, 1) < len(order) * 2 / 3


@within(20)
async def test_an_instance_whose_last_slot_a_claim_took_leaves_new_groups_to_its_peers(stack: Stack) -> None:
    """Its reader still waited at the broker for the same slot. The next group was given to it and waited in its hands,
    for the first to end or for a lease, beside an idle peer.
    """
    stack.options["lease_s"] = 15.0
    stack.host({"s": {"replicas": 2}})
    go, busy = asyncio.Event(), asyncio.Event()
    failing = Failing(1, ConnectionError("reset"))

    async def slow(row: Row) -> Row:
        result = await failing.rollout(row)
        busy.set()
        await go.wait()
        return result

    full = await stack.worker(EachRow(slow), label="s/0", slots=1, retry_backoff_s=0.2)
    client = await stack.connected()
    async with client.run_groups(rows_of(1), 2) as first:
        await busy.wait()
        async with client.run_groups(rows_of(1), 2) as second:
            await until(lambda: stack.redis.xlen(stack.keys.groups("s")) == 2)
            peer = await stack.worker(label="s/1")
            async with asyncio.timeout(5):
                groups = await groups_of(second)
            check_groups(groups, 1)
        assert sum(peer.statistics().ended.values()) == 1
        assert full.statistics().running == 1
        go.set()
        check_groups(await groups_of(first), 1)


@within(30)
async def test_groups_of_a_dead_instance_follow_one_another_whatever_is_in_the_queue(stack: Stack) -> None:
    """An instance looked for them once a second and took as many as it had places free just then: one. New groups had
    all the other places that came free.
    """
    order: list[int] = []

    async def rollout(row: Row) -> Row:
        order.append(row["_rowidx"])
        await asyncio.sleep(0.03)
        return {"row": row["_rowidx"]}

    client = await stack.connected()
    async with client.run_groups(rows_of(150, 1), 1) as batch:
        queue = stack.keys.groups("s")
        await until(lambda: stack.redis.exists(queue) and stack.redis.xlen(queue) == 150)
        stack.redis.xreadgroup("workers", "dead:1", {queue: ">"}, count=4)
        await stack.worker(EachRow(rollout), slots=1)
        check_groups(await groups_of(batch), 150, 1)
    places = [order.index(row) for row in range(4)]
    assert max(places) - min(places) < 30


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

"""Groups that come again: retries and their budgets, what of a group runs again, and who claims it for which slot."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from rolloutbus.broker.errors import GroupFailedError
from rolloutbus.trainer import BatchCounts

from tests.stacks import EachRow, Row, Stack, WholeGroup, check_groups, groups_of, outcome_of, rows_of, until, within


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
async def test_what_is_due_again_follows_at_once_before_anything_new(stack: Stack) -> None:
    """Found by chaos: after each there was a pause of 50 ms, in which new groups had the places that came free."""
    started: list[int] = []

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        group = rows[0]["_rowidx"] // 2
        started.append(group)
        if group < 2 and started.count(group) == 1:
            raise ValueError("once")
        if group == 2:
            # Both of them are due by then.
            await asyncio.sleep(0.5)
        for row in rows:
            yield row, {"row": row["_rowidx"]}

    await stack.worker(WholeGroup(behaviour), slots=1)
    groups, _ = await outcome_of(stack, 12)
    check_groups(groups, 12)
    again = {group: [at for at, one in enumerate(started) if one == group][1] for group in (0, 1)}
    assert max(again.values()) < started.index(3), started


@within(20)
async def test_one_good_instance_among_failing_ones_ends_every_group(stack: Stack) -> None:
    stack.host({"s": {"replicas": 4}})
    bad = [WholeGroup(failing_with(ValueError("no GPU here"))) for _ in range(3)]
    for at, environment in enumerate(bad):
        await stack.worker(environment, label=f"s/{at}", data_attempts=4)
    await stack.worker(EachRow(), label="s/3", data_attempts=4)
    groups, _ = await outcome_of(stack, 12)
    check_groups(groups, 12)
    calls = [(at, *call) for at, environment in enumerate(bad) for call in environment.calls]
    assert max(Counter(call[1:] for call in calls).values()) > 1, "no group failed on two of them"
    assert len(set(calls)) == len(calls), "a group came again to one that had failed it"


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

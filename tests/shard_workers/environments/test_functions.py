"""What a stream of rollouts promises while functions succeed, fail, hang, or are told to stop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from rolloutbus.broker.errors import ClosedError, EnvironmentContractError, RouteError
from rolloutbus.shard_workers.environments import Environment, GroupBrokenError, RolloutContext, functions
from rolloutbus.shard_workers.environments.functions import FunctionsEnvironment

from .conftest import Start

Row = dict[str, Any]


def group(size: int, first: int = 0, route: str = "probe") -> list[Row]:
    return [
        {"_rowidx": first + place, "agent_ref": {"name": route}, "responses_create_params": {"input": ["ask"]}}
        for place in range(size)
    ]


async def run(environment: FunctionsEnvironment, rows: list[Row]) -> dict[int, Any]:
    return {row["_rowidx"]: outcome async for row, outcome in environment.run_rollouts(rows)}


class Blocking:
    """A rollout that never ends by itself and tells when it runs and when it was cancelled."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.all_running = asyncio.Event()
        self.running: set[int] = set()
        self.cancelled: set[int] = set()

    async def __call__(self, row: Row, context: RolloutContext) -> Row:
        self.running.add(row["_rowidx"])
        if len(self.running) == self.expected:
            self.all_running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.add(row["_rowidx"])
            raise
        raise AssertionError("an event that nobody sets was set")


def test_the_functions_environment_fulfils_the_contract() -> None:
    assert isinstance(FunctionsEnvironment(), Environment)


async def test_rows_come_in_completion_order_as_the_objects_that_were_given(start: Start) -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def gated(row: Row, context: RolloutContext) -> Row:
        index: int = row["_rowidx"]
        await gates[index].wait()
        return {"reward": index}

    rows = group(3)
    stream = (await start(gated)).run_rollouts(rows)
    async with aclosing(stream):
        for index in (2, 0, 1):
            gates[index].set()
            row, outcome = await anext(stream)
            assert row is rows[index]
            assert outcome == {"reward": index}
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_failing_row_is_its_own_failure_and_its_siblings_go_on(start: Start) -> None:
    async def second_fails(row: Row, context: RolloutContext) -> Row:
        if row["_rowidx"] == 1:
            raise KeyError("no answer")
        return {"reward": 1.0}

    outcomes = await run(await start(second_fails), group(3))
    assert isinstance(outcomes.pop(1), KeyError)
    assert outcomes == {0: {"reward": 1.0}, 2: {"reward": 1.0}}


@pytest.mark.parametrize(
    "raised", [asyncio.CancelledError("inner"), SystemExit(3), StopAsyncIteration(), GeneratorExit()]
)
async def test_whatever_a_function_raises_is_that_rows_failure(start: Start, raised: BaseException) -> None:
    async def first_raises(row: Row, context: RolloutContext) -> Row:
        if row["_rowidx"] == 0:
            raise raised
        return {"reward": 1.0}

    outcomes = await run(await start(first_raises), group(2))
    assert isinstance(outcomes[0], BaseException)
    assert raised in (outcomes[0], outcomes[0].__cause__)
    assert outcomes[1] == {"reward": 1.0}


async def test_an_interrupt_of_its_own_is_that_rows_failure(start: Start) -> None:
    """It ended the event loop, and with it every other group of the worker."""

    async def first_raises(row: Row, context: RolloutContext) -> Row:
        if row["_rowidx"] == 0:
            raise KeyboardInterrupt("enough")
        return {"reward": 1.0}

    # As in a fleet: in the main thread it may be somebody's Ctrl-C.
    outcomes = await asyncio.to_thread(asyncio.run, run(await start(first_raises), group(2)))
    assert isinstance(outcomes[0], EnvironmentContractError)
    assert "(entry 'probe') raised KeyboardInterrupt(enough)" in str(outcomes[0])
    assert outcomes[1] == {"reward": 1.0}


async def test_a_cancellation_of_its_own_names_the_row_and_what_to_do(start: Start) -> None:
    async def cancels_itself(row: Row, context: RolloutContext) -> Row:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return {}

    outcomes = await run(await start(cancels_itself), group(1, first=41))
    assert isinstance(outcomes[41], EnvironmentContractError)
    assert "row 41 raised CancelledError though nobody cancelled it" in str(outcomes[41])


@pytest.mark.parametrize(("returned", "named"), [(None, "NoneType"), (1.0, "float"), ("text", "str")])
async def test_a_result_that_is_no_dict_breaks_the_contract(start: Start, returned: Any, named: str) -> None:
    async def returns(row: Row, context: RolloutContext) -> Any:
        return returned

    outcomes = await run(await start(returns), group(1))
    assert isinstance(outcomes[0], EnvironmentContractError)
    assert f"(entry 'probe') returned {named} for row 0" in str(outcomes[0])


class Opaque:
    """Numbers that know no other name than `__float__`, as scalars of array libraries do."""

    def __float__(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({}, "a dict without 'reward' (its keys: (none))"),
        ({"score": 1}, "a dict without 'reward' (its keys: 'score')"),
        ({"reward": "0.5"}, "the reward '0.5', which is no number,"),
        ({"reward": None}, "the reward None, which is no number,"),
        ({"reward": [1.0]}, "the reward [1.0], which is no number,"),
        ({"reward": np.str_("0.5")}, "the reward np.str_('0.5'), which is no number,"),
        ({"reward": np.zeros(1)}, "the reward array([0.]), which is no number,"),
        ({"reward": 1j}, "the reward 1j, which is no number,"),
    ],
)
async def test_a_result_without_a_reward_breaks_the_contract(start: Start, returned: Row, named: str) -> None:
    """It passed as a success: `run` printed a reward of `-`, no failure, and exit code 0."""

    async def returns(row: Row, context: RolloutContext) -> Row:
        return returned

    outcomes = await run(await start(returns), group(1))
    assert isinstance(outcomes[0], EnvironmentContractError)
    assert f"(entry 'probe') returned {named} for row 0; return a dict with" in str(outcomes[0])


@pytest.mark.parametrize("reward", [True, 1, -0.5, float("nan"), np.float32(0.5), np.int64(1), np.ones(()), Opaque()])
async def test_any_real_number_is_a_reward(start: Start, reward: Any) -> None:
    async def rewards(row: Row, context: RolloutContext) -> Row:
        return {"reward": reward}

    assert (await run(await start(rewards), group(1)))[0]["reward"] is reward


async def test_a_reward_may_stand_in_the_full_result_as_nemo_rl_has_it(start: Start) -> None:
    async def nested(row: Row, context: RolloutContext) -> Row:
        return {"full_result": {"reward": 0.5}}

    assert await run(await start(nested), group(1)) == {0: {"full_result": {"reward": 0.5}}}


async def test_a_route_that_is_not_hosted_fails_its_row_and_names_the_hosted(start: Start) -> None:
    async def fine(row: Row, context: RolloutContext) -> Row:
        return {"reward": 1.0}

    outcomes = await run(await start(fine), [*group(1), *group(1, first=1, route="other"), {"_rowidx": 2}])
    assert outcomes[0] == {"reward": 1.0}
    assert isinstance(outcomes[1], RouteError)
    assert "'other', which is not hosted here; hosted: probe" in str(outcomes[1])
    assert isinstance(outcomes[2], RouteError)


async def test_what_a_function_does_to_its_row_is_seen_by_nobody_else(start: Start) -> None:
    shared = {"input": [{"role": "user", "content": "hello"}]}
    leaf = object()

    async def writes(row: Row, context: RolloutContext) -> Row:
        row["responses_create_params"]["input"].append({"role": "assistant"})
        del row["agent_ref"]
        row["_rowidx"] = -1
        turns = len(row["responses_create_params"]["input"])
        return {"reward": turns, "same_leaf": row["leaf"] is leaf}

    rows = [{**row, "responses_create_params": shared, "leaf": leaf} for row in group(2)]
    outcomes = await run(await start(writes), rows)
    assert outcomes == {0: {"reward": 2, "same_leaf": True}, 1: {"reward": 2, "same_leaf": True}}
    assert len(shared["input"]) == 1


async def test_the_context_carries_policy_entry_and_the_entrys_other_options(start: Start) -> None:
    async def reports(row: Row, context: RolloutContext) -> Row:
        answer = await context.policy.complete([{"role": "user", "content": "Hm?"}], seed=1)
        siblings = context.group.size
        return {"reward": 1, "answer": answer, "entry": context.entry, "options": context.options, "siblings": siblings}

    environment = await start(reports, max_concurrency=2, tolerance=0.5, nested={"deep": [1]})
    outcome = (await run(environment, group(3)))[0]
    assert outcome["entry"] == "probe"
    assert outcome["options"] == {"tolerance": 0.5, "nested": {"deep": [1]}}
    assert outcome["siblings"] == 3
    assert "not" in outcome["answer"]


async def test_closing_the_iterator_ends_every_task_before_it_returns(start: Start) -> None:
    blocking = Blocking(expected=3)

    async def all_but_the_first_block(row: Row, context: RolloutContext) -> Row:
        if row["_rowidx"]:
            return await blocking(row, context)
        await blocking.all_running.wait()
        return {"reward": 0.0}

    stream = (await start(all_but_the_first_block)).run_rollouts(group(4))
    row, _ = await anext(stream)
    assert row["_rowidx"] == 0
    await stream.aclose()
    assert blocking.cancelled == {1, 2, 3}
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_the_reader_reaches_the_functions(start: Start) -> None:
    blocking = Blocking(expected=4)
    reader = asyncio.create_task(run(await start(blocking), group(4)))
    await blocking.all_running.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert blocking.cancelled == {0, 1, 2, 3}


async def test_closing_one_group_leaves_another_running(start: Start) -> None:
    blocking = Blocking(expected=2)
    environment = await start(blocking)
    readers = [asyncio.create_task(run(environment, group(1, first=first))) for first in (0, 1)]
    await blocking.all_running.wait()
    readers[0].cancel()
    await asyncio.wait([readers[0]])
    assert blocking.cancelled == {0}
    assert not readers[1].done()
    readers[1].cancel()
    await asyncio.wait([readers[1]])
    assert blocking.cancelled == {0, 1}


async def test_a_stream_that_was_never_read_runs_nothing(start: Start) -> None:
    calls: list[int] = []

    async def records(row: Row, context: RolloutContext) -> Row:
        calls.append(row["_rowidx"])
        return {}

    stream = (await start(records)).run_rollouts(group(2))
    await stream.aclose()
    assert calls == []


async def test_a_function_that_ignores_its_cancellation_is_named_and_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(functions, "CANCEL_GRACE_S", 0.01)
    running, release = asyncio.Event(), asyncio.Event()

    async def stubborn(row: Row, context: RolloutContext) -> Row:
        running.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return {}

    reader = asyncio.create_task(run(await start(stubborn), group(1, first=7)))
    await running.wait()
    reader.cancel()
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await reader
    assert "is left running: rollout of row 7" in caplog.text
    release.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})


async def test_stopping_fails_what_still_runs_and_nobody_waits(start: Start) -> None:
    blocking = Blocking(expected=2)
    environment = await start(blocking)
    reader = asyncio.create_task(run(environment, group(2)))
    await blocking.all_running.wait()
    await environment.stop()
    outcomes = await reader
    assert blocking.cancelled == {0, 1}
    assert [type(outcome) for outcome in outcomes.values()] == [ClosedError, ClosedError]


async def test_stop_is_safe_before_start_and_twice_and_health_tells(start: Start) -> None:
    environment = FunctionsEnvironment()
    await environment.stop()
    with pytest.raises(ClosedError, match="call start"):
        await environment.health()

    async def fine(row: Row, context: RolloutContext) -> Row:
        return {}

    environment = await start(fine)
    await environment.health()
    await environment.stop()
    await environment.stop()
    with pytest.raises(ClosedError):
        await environment.health()
    with pytest.raises(ClosedError):
        await run(environment, group(1))


class Counting:
    """Counts how many of its rollouts run at once."""

    def __init__(self, meets: bool) -> None:
        self.now = 0
        self.most = 0
        self.meets = meets

    async def __call__(self, row: Row, context: RolloutContext) -> Row:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        values = await context.group.gather(row["_rowidx"]) if self.meets else []
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return {"reward": 1, "values": values}


async def test_an_entrys_limit_holds_over_all_groups(start: Start) -> None:
    counting = Counting(meets=False)
    environment = await start(counting, max_concurrency=3)
    both = await asyncio.gather(run(environment, group(8)), run(environment, group(8, first=8)))
    assert [len(outcomes) for outcomes in both] == [8, 8]
    assert counting.most == 3


async def test_siblings_meet_even_where_fewer_than_the_group_may_run_at_once(start: Start) -> None:
    counting = Counting(meets=True)
    environment = await start(counting, max_concurrency=2)
    async with asyncio.timeout(10):
        both = await asyncio.gather(run(environment, group(5)), run(environment, group(5, first=5)))
    assert [outcomes[first]["values"] for outcomes, first in zip(both, (0, 5), strict=True)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert counting.most == 2


async def test_a_sibling_failing_does_not_hang_the_gather_and_is_reported_first(start: Start) -> None:
    async def last_fails(row: Row, context: RolloutContext) -> Row:
        if row["_rowidx"] == 2:
            raise TimeoutError("the judge is slow")
        return {"reward": 1, "values": await context.group.gather(row["_rowidx"])}

    environment = await start(last_fails)
    async with asyncio.timeout(10):
        outcomes = [(row["_rowidx"], outcome) async for row, outcome in environment.run_rollouts(group(3))]
    assert outcomes[0][0] == 2
    for _, outcome in outcomes[1:]:
        assert isinstance(outcome, GroupBrokenError)
        assert outcome.__cause__ is outcomes[0][1]

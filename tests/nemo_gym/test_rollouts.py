"""Rows through one real stack: rewards, routing, failures, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from rolloutbus.broker.errors import EncodeError
from rolloutbus.shard_workers.environments.nemo_gym import NemoGymEnvironment
from rolloutbus.shard_workers.environments.nemo_gym.errors import GymRolloutError, GymRowTimeoutError
from rolloutbus.shard_workers.failures import describe

from tests.nemo_gym.conftest import ROW_TIMEOUT_S
from tests.nemo_gym.support import Held, Model, Row, example_rows

AGENT = "mcqa_simple_agent"


def group(number: int = 0, **more: Any) -> list[Row]:
    rows = example_rows("mcqa", AGENT)[4 * number : 4 * number + 4]
    return [{**row, "_rowidx": at, "_group_id": f"test:{number}:1", **more} for at, row in enumerate(rows)]


async def outcomes(environment: NemoGymEnvironment, rows: list[Row]) -> list[Any]:
    """What each row came back with, in input order; rows come back as the objects that went in."""
    found: dict[int, Any] = {}
    async for row, outcome in environment.run_rollouts(rows):
        assert any(row is given for given in rows)
        found[row["_rowidx"]] = outcome
    return [found[at] for at in range(len(rows))]


async def test_entries_are_agents_models_and_resources_servers(mcqa: NemoGymEnvironment) -> None:
    entries = mcqa.list_entries()
    # Only newer versions of NeMo Gym have these.
    servers = {name: kinds for name, kinds in entries.items() if kinds == ["environment_servers"]}
    assert {name: kinds for name, kinds in entries.items() if name not in servers} == {
        "policy_model": ["responses_api_models"],
        "mcqa": ["resources_servers"],
        AGENT: ["responses_api_agents"],
    }
    assert set(servers) <= {"mcqa_environment_server"}


async def test_results_carry_the_verifiers_reward_and_the_tokens_that_were_made(mcqa: NemoGymEnvironment) -> None:
    results = await outcomes(mcqa, group())
    assert {result["reward"] for result in results} == {0.0, 1.0}
    for result in results:
        item = result["response"]["output"][-1]
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0


async def test_a_row_with_a_task_source_alone_reaches_the_agent_of_that_resources_server(
    mcqa: NemoGymEnvironment,
) -> None:
    rows = group()
    for row in rows:
        del row["agent_ref"]
        row["task_source"] = "mcqa"
    assert [result["reward"] for result in await outcomes(mcqa, rows)] == [
        result["reward"] for result in await outcomes(mcqa, group())
    ]


async def test_a_route_that_the_stack_does_not_have_fails_its_rows_and_the_next_call_runs(
    mcqa: NemoGymEnvironment,
) -> None:
    failed = await outcomes(mcqa, group(agent_ref={"name": "nobody"}))
    assert all(isinstance(outcome, Exception) and "nobody" in str(outcome) for outcome in failed)
    assert all(isinstance(outcome, dict) for outcome in await outcomes(mcqa, group()))


async def test_a_model_that_answers_500_fails_the_row_with_status_and_text(
    mcqa: NemoGymEnvironment, model: Model
) -> None:
    def refuse(path: str, request: Any) -> Any:
        return (500, {"error": {"message": "out of memory"}}) if request.get("temperature") == 0.25 else None

    model.reset(refuse)
    results = await outcomes(mcqa, group())
    assert [type(result) for result in results] == [dict, GymRolloutError, dict, dict]
    failure = describe(pickle.loads(pickle.dumps(results[1])))
    assert (failure.failure_class, failure.http_status) == ("infra", 500)
    assert "ClientResponseError" in failure.message
    # Gym tells which of its servers met the error; the model's own words stay in that server's log.
    assert "policy_model calling an inner server" in failure.message


async def test_a_model_that_is_down_for_three_seconds_delays_the_rows_and_fails_none(
    mcqa: NemoGymEnvironment, model: Model
) -> None:
    expected = [result["reward"] for result in await outcomes(mcqa, group())]
    model.down()
    running = asyncio.create_task(outcomes(mcqa, group()))
    done, _ = await asyncio.wait({running}, timeout=3)
    model.up()
    assert not done
    assert [result["reward"] for result in await running] == expected


async def test_a_model_that_hangs_ends_in_the_rows_deadline_and_its_siblings_are_not_held_up(
    mcqa: NemoGymEnvironment, model: Model
) -> None:
    held = Held(lambda request: request.get("temperature") == 0.5)
    model.reset(held)
    finished: list[int] = []
    async for row, outcome in mcqa.run_rollouts(group()):
        finished.append(row["_rowidx"])
        assert isinstance(outcome, GymRowTimeoutError) == (row["_rowidx"] == 2)
        if isinstance(outcome, GymRowTimeoutError):
            assert describe(outcome).failure_class == "infra"
            assert f"{ROW_TIMEOUT_S:g} s" in str(outcome)
    held.release()
    assert finished[-1] == 2


async def test_closing_a_call_ends_it_at_once_while_the_model_hangs(mcqa: NemoGymEnvironment, model: Model) -> None:
    held = Held()
    model.reset(held)
    stream = mcqa.run_rollouts(group())
    waiting = asyncio.ensure_future(anext(stream))
    assert await asyncio.to_thread(held.arrived.acquire, timeout=ROW_TIMEOUT_S)
    waiting.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await stream.aclose()
    held.release()
    model.reset()
    assert len(await outcomes(mcqa, group(1))) == 4


async def test_the_stack_says_that_it_is_well_from_any_thread(mcqa: NemoGymEnvironment) -> None:
    await mcqa.health()
    await asyncio.to_thread(lambda: asyncio.run(mcqa.health()))


async def test_a_row_that_has_no_json_form_fails_at_once_and_the_next_call_runs(mcqa: NemoGymEnvironment) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(EncodeError, match=r"the group that begins at row 0 .*: rows\[0\]\.odd is of type object"):
            await outcomes(mcqa, group(odd=object()))
    assert all(isinstance(outcome, dict) for outcome in await outcomes(mcqa, group()))

"""Real servers behind real workers and a broker: two shards, and failures on their way to the dead letters."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.shard_workers.environments.nemo_gym import NemoGymEnvironment
from rolloutbus.trainer import CompletedGroup, GroupFailure

from tests.nemo_gym.support import ROOT, Held, Model, Row, example_rows, gym_config, shipped_config
from tests.stacks import stack_on

GENERATIONS = 4
HEAD_PORT = 21_399
MCQA, WORKPLACE = "mcqa_simple_agent", "workplace_assistant_simple_agent"
SHARDS: dict[str, dict[str, Any]] = {"quiz": {}, "office": {}}
ROUTES = {MCQA: "quiz", "mcqa": "quiz", WORKPLACE: "office", "workplace_assistant": "office"}


async def test_two_shards_give_the_rewards_that_gyms_own_collection_gives(
    model: Model, mcqa: NemoGymEnvironment, broker: EmbeddedBroker
) -> None:
    """Five rows of four generations each; Gym's own collection runs against the very same servers."""
    head = {"host": "127.0.0.1", "port": HEAD_PORT}
    office = NemoGymEnvironment()
    paths = [shipped_config("workplace_assistant"), shipped_config("mcqa")]
    await office.start(gym_config(model, *paths, ports=(21_300, 21_400), head_server=head))
    try:
        rows = example_rows("mcqa", MCQA) + example_rows("workplace_assistant", WORKPLACE)
        own = await gyms_own_rewards([dict(row) for row in rows])
        async with stack_on(broker) as stack:
            stack.host(SHARDS, ROUTES)
            await stack.worker(mcqa, "quiz")
            await stack.worker(office, "office")
            client = await stack.connected()
            async with client.run_groups(rows, GENERATIONS) as batch:
                groups = [group async for group in batch]
        assert len(groups) == 10
        for group in groups:
            assert isinstance(group, CompletedGroup)
            first = group.group_index * GENERATIONS
            assert [result["reward"] for result in group.results] == own[first : first + GENERATIONS]
            assert {origin.instance for origin in group.origins} == {ROUTES[group.rows[0]["agent_ref"]["name"]]}
        assert {0.0, 1.0} == set(own[:20]) == set(own[20:])
    finally:
        await office.stop()


async def gyms_own_rewards(rows: list[Row]) -> list[float]:
    """What `RolloutCollectionHelper.run_examples` gives in a process without rolloutbus, in input order."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.nemo_gym.gyms_own_collection", str(HEAD_PORT),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    numbered = [{**row, "_rowidx": at} for at, row in enumerate(rows)]
    output, _ = await process.communicate(json.dumps(numbered).encode())
    rewards: dict[str, float] = json.loads(output.decode().splitlines()[-1])
    return [rewards[str(at)] for at in range(len(rows))]


async def test_a_model_that_keeps_answering_500_is_tried_again_and_then_the_group_is_dead_with_the_text(
    model: Model, mcqa: NemoGymEnvironment, broker: EmbeddedBroker
) -> None:
    asked: list[str] = []

    def refuse(path: str, request: Any) -> Any:
        if path == "/v1/chat/completions" and request.get("temperature") == 0.75:
            asked.append(path)
            return 500, {"error": {"message": "canned"}}
        return None

    model.reset(refuse)
    async with stack_on(broker) as stack:
        stack.host({"quiz": {}}, {MCQA: "quiz"})
        await stack.worker(mcqa, "quiz", infra_attempts=2)
        client = await stack.connected()
        async with client.run_groups(
            example_rows("mcqa", MCQA)[:GENERATIONS], GENERATIONS, on_failure="yield"
        ) as batch:
            [failure] = [group async for group in batch]
        [(_, letter)] = stack.redis.xrange(stack.keys.dead)
    assert isinstance(failure, GroupFailure)
    assert (failure.failure_class, failure.http_status, failure.attempt) == ("infra", 500, 2)
    assert "policy_model calling an inner server" in failure.message
    # Gym's own client asks three times for each of the two attempts.
    assert len(asked) == 6
    assert b"policy_model calling an inner server" in b" ".join(letter.values())


async def test_a_model_that_hangs_once_costs_one_attempt(
    model: Model, mcqa: NemoGymEnvironment, broker: EmbeddedBroker
) -> None:
    """The row's deadline is infrastructure, so the group runs again and completes."""
    held = Held()
    model.reset(held)
    async with stack_on(broker) as stack:
        stack.host({"quiz": {}}, {MCQA: "quiz"})
        await stack.worker(mcqa, "quiz")
        client = await stack.connected()
        async with client.run_groups(example_rows("mcqa", MCQA)[:GENERATIONS], GENERATIONS) as batch:
            waiting = asyncio.ensure_future(anext(batch))
            await stack.happens("retry")
            held.release()
            group = await waiting
    assert isinstance(group, CompletedGroup)
    assert {origin.attempt for origin in group.origins} == {2}

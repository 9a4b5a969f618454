"""A fleet of Ray actors with real servers: what the fleet makes of a server that dies."""

from __future__ import annotations

import asyncio
import functools
import importlib
from typing import Any

import psutil
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.shard_workers import ShardFleet
from rolloutbus.trainer import CompletedGroup

from tests.nemo_gym.support import Model, example_rows, gym_config, is_server, shipped_config, still_there
from tests.stacks import Stack

GENERATIONS = 4
AGENT = "mcqa_simple_agent"


async def test_an_instance_whose_agent_server_died_is_replaced_and_its_groups_complete(
    model: Model, broker: EmbeddedBroker
) -> None:
    ray: Any = importlib.import_module("ray")
    stack = Stack(broker)
    # Another stack may live for the whole session.
    others = gym_servers()
    fleet = await asyncio.to_thread(ShardFleet.start, fleet_config(model, broker, stack.run))
    try:
        async with stack.client() as client:
            rows = example_rows("mcqa", AGENT)
            run = functools.partial(client.run_groups, rows, GENERATIONS)
            async with run() as batch:
                before = rewards_of([group async for group in batch])
            [server] = gym_servers(AGENT) - others
            server.kill()
            async with run() as batch:
                after = rewards_of([group async for group in batch])
            assert after == before
        await stack.happens("instance-died")
        await stack.happens("instance-restarted")
        [replacement] = gym_servers(AGENT) - others
        assert replacement != server
        servers = gym_servers() - others
    finally:
        await asyncio.to_thread(fleet.shutdown)
        ray.shutdown()
        stack.redis.close()
        await stack.watch.aclose()
    assert still_there([*servers]) == []


def fleet_config(model: Model, broker: EmbeddedBroker, run: str) -> dict[str, Any]:
    return {
        "rolloutbus": {
            "run": run,
            "environment": "nemo_gym",
            "broker": {"url": broker.url, "lease_s": 2.0},
            "workers": {"health_every_s": 1.0},
            "fleet": {"actor_cpus": 0.2, "health_failures": 1},
        },
        "env": {"nemo_gym": gym_config(model, shipped_config("mcqa"), ports=(21_700, 21_800))},
    }


def rewards_of(groups: list[Any]) -> dict[int, list[float]]:
    assert all(isinstance(group, CompletedGroup) for group in groups)
    return {group.group_index: [result["reward"] for result in group.results] for group in groups}


def gym_servers(name: str = "") -> set[psutil.Process]:
    """Gym's servers among this process's descendants; all, or those of one name."""
    return {process for process in psutil.Process().children(recursive=True) if is_server(process, name)}

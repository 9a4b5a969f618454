"""Starting, failing to start, dying, stopping: whatever happens, every process of the stack is gone afterwards."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from rolloutbus.broker.errors import ConfigError
from rolloutbus.shard_workers.environments.nemo_gym import NemoGymEnvironment
from rolloutbus.shard_workers.environments.nemo_gym.errors import GymStackError, GymStartError

from tests.nemo_gym.support import HERE, ROOT, Held, Model, gym_config, is_server, shipped_config, still_there, tree_of
from tests.nemo_gym.test_rollouts import group, outcomes

SERVERS = 3


async def test_a_dead_agent_server_ends_running_rows_and_health_names_it_and_stop_leaves_nothing(
    model: Model, tmp_path: Path
) -> None:
    """With a log folder, which makes Gym's own shutdown forget the servers."""
    before = set(psutil.Process().children())
    environment = NemoGymEnvironment()
    config = gym_config(model, shipped_config("mcqa"), ports=(21_100, 21_200), nemo_gym_log_dir=str(tmp_path))
    await environment.start(config)
    try:
        [supervisor] = set(psutil.Process().children()) - before
        tree = tree_of(supervisor.pid)
        held = Held()
        model.reset(held)
        running = asyncio.create_task(outcomes(environment, group()))
        assert await asyncio.to_thread(held.arrived.acquire, timeout=30)
        next(process for process in tree if is_server(process, "mcqa_simple_agent")).kill()
        held.release()
        async with asyncio.timeout(10):
            results = await running
        assert any(isinstance(result, GymStackError) and "mcqa_simple_agent" in str(result) for result in results)
        with pytest.raises(GymStackError, match="mcqa_simple_agent"):
            await environment.health()
    finally:
        await environment.stop()
    await environment.stop()
    assert still_there(tree) == []
    assert (tmp_path / "stack.log").stat().st_size > 0


async def test_a_config_that_gym_refuses_is_a_start_error_with_gyms_words_and_leaves_nothing(model: Model) -> None:
    environment = NemoGymEnvironment()
    config = gym_config(model, "resources_servers/no_such/configs/no_such.yaml", ports=(21_200, 21_300))
    with pytest.raises(GymStartError, match="no_such"):
        await environment.start(config)
    await environment.stop()


async def test_a_server_that_dies_while_starting_is_a_start_error_and_the_others_are_ended(
    model: Model, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(json.dumps({"mcqa": {"resources_servers": {"mcqa": {"num_workers": "no number"}}}}))
    config = gym_config(model, shipped_config("mcqa"), str(broken), ports=(21_200, 21_300))
    with pytest.raises(GymStartError):
        await NemoGymEnvironment().start(config)


async def test_a_verifiers_group_size_is_checked_against_num_generations_when_the_stack_starts(model: Model) -> None:
    more = {"judge_url": model.url, "rolloutbus_num_generations": 8}
    config = gym_config(model, str(HERE / "genrm.yaml"), ports=(21_200, 21_300), **more)
    with pytest.raises(ConfigError, match=r"num_rollouts_per_prompt.*is 8"):
        await NemoGymEnvironment().start(config)


async def test_a_killed_worker_leaves_no_process_of_its_stack(model: Model) -> None:
    config = gym_config(model, shipped_config("mcqa"), ports=(21_200, 21_300))
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.nemo_gym.worker_program", json.dumps({"config": config}),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert worker.stdout is not None
    started: Any = json.loads(await worker.stdout.readline())
    tree = tree_of(started["supervisor"])
    assert sum("app.py" in " ".join(process.cmdline()) for process in tree) >= SERVERS
    worker.kill()
    await worker.wait()
    assert still_there(tree) == []

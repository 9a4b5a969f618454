"""genrm_compare, which scores siblings against each other and waits for ever for one that never comes, on two
replicas.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import psutil
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.trainer import CompletedGroup, GroupFailure

from examples.nemo_gym.model_server import WRONG
from tests.nemo_gym.support import HERE, ROOT, Held, Model, Row, gym_config, still_there, tree_of
from tests.stacks import Stack, stack_on

SIBLINGS = 4
LAST = 0.75
# 0.4 compares each sibling on arrival with those before it, newer versions compare once all are there.
JUDGES_ARRIVALS = importlib.metadata.version("nemo-gym").startswith("0.4")


class Replica:
    """A worker process with its stack; its ports are its own."""

    def __init__(self, process: asyncio.subprocess.Process, tree: list[psutil.Process]) -> None:
        self.process = process
        self.tree = tree

    @classmethod
    async def start(cls, stack: Stack, model: Model, number: int) -> Replica:
        ports = (21_500 + 100 * number, 21_600 + 100 * number)
        order = {
            "config": gym_config(model, str(HERE / "genrm.yaml"), ports=ports, judge_url=model.url),
            "broker": stack.settings.model_dump(), "run": stack.run, "shard": "judge", "label": f"judge/{number}",
            "worker": {"commit": "group", "retry_backoff_s": 0.01, "slots": 2},
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.nemo_gym.worker_program", json.dumps(order),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        assert process.stdout is not None
        started = json.loads(await process.stdout.readline())
        return cls(process, tree_of(started["supervisor"]))

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()
        assert still_there(self.tree) == []

    async def stop(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            await self.process.wait()
            assert still_there(self.tree) == []


def rows_to_compare(prompts: int) -> list[Row]:
    return [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": f"Which is better? Question {prompt}"}],
                "temperature": sibling / SIBLINGS,
            },
            "agent_ref": {"name": "genrm_agent"},
            "_ng_task_index": 0,
            "_ng_rollout_index": sibling,
        }
        for prompt in range(prompts)
        for sibling in range(SIBLINGS)
    ]


def check_scored_once(outcomes: list[CompletedGroup | GroupFailure], prompts: int) -> list[CompletedGroup]:
    """Each group came once, from one instance and one attempt, with rewards that a comparison of its own four answers
    gives.
    """
    groups = [group for group in outcomes if isinstance(group, CompletedGroup)]
    assert sorted(group.group_index for group in groups) == list(range(prompts)), outcomes
    for group in groups:
        assert len(set(group.origins)) == 1
        for sibling, result in enumerate(group.results):
            # Where the verifier tells which sibling it scored, it is the caller's own number.
            assert result.get("_ng_rollout_index", sibling) == sibling
            assert "_ng_group_id" not in result
        right = [result["reward"] for result in group.results if WRONG not in said(result)]
        wrong = [result["reward"] for result in group.results if WRONG in said(result)]
        assert len(right) + len(wrong) == SIBLINGS
        assert min(right, default=6) > max(wrong, default=0)
    return groups


def said(result: dict[str, Any]) -> str:
    return result["response"]["output"][-1]["content"][0]["text"]


async def test_groups_meet_on_two_replicas_and_a_killed_workers_group_is_scored_once_by_one_attempt(
    model: Model, broker: EmbeddedBroker
) -> None:
    """Three siblings of a group have arrived at the verifier when the worker dies; the other replica must not wait
    for them.
    """
    async with AsyncExitStack() as ends, stack_on(broker) as stack:
        stack.host({"judge": {"replicas": 2, "commit": "group"}}, {"genrm_agent": "judge"})
        replicas: list[Replica] = []
        # One after the other: each starts a Ray of its own, and two at once may take longer than Ray waits.
        for number in range(2):
            replicas.append(await Replica.start(stack, model, number))
            ends.push_async_callback(replicas[-1].stop)
        client = await stack.connected()
        async with client.run_groups(rows_to_compare(6), SIBLINGS) as batch:
            outcomes = [group async for group in batch]
        groups = check_scored_once(outcomes, 6)
        # Not all alike, or the comparison above compares nothing.
        assert len({result["reward"] for group in groups for result in group.results}) > 1
        assert {origin.instance for group in groups for origin in group.origins} == {"judge/0", "judge/1"}

        answered, judged = asyncio.Semaphore(0), asyncio.Semaphore(0)
        verdicts: list[str] = []
        loop = asyncio.get_running_loop()
        held = Held(lambda request: request.get("temperature") == LAST)

        def watch(path: str, request: Any) -> None:
            if path == "/v1/responses":
                verdicts.append(path)
                loop.call_soon_threadsafe(judged.release)
            held(path, request)
            if path == "/v1/chat/completions":
                loop.call_soon_threadsafe(answered.release)

        model.reset(watch)
        async with client.run_groups(rows_to_compare(1), SIBLINGS) as batch:
            waiting = asyncio.ensure_future(anext(batch))
            for _ in range(SIBLINGS - 1):
                await answered.acquire()
            if JUDGES_ARRIVALS:
                for _ in range(2):
                    await judged.acquire()
            else:
                # Nothing tells from outside that the verifier has them; they are on their way.
                await asyncio.sleep(1)
            label = await holder(stack)
            await replicas[int(label[-1])].kill()
            held.release()
            outcome = await waiting
        [group] = check_scored_once([outcome], 1)
        assert {origin.instance for origin in group.origins} == {f"judge/{1 - int(label[-1])}"}
        assert {origin.attempt for origin in group.origins} == {2}
        # Each of the four is compared with the next, all anew.
        assert len(verdicts) == SIBLINGS + (2 if JUDGES_ARRIVALS else 0)
        for replica in replicas:
            await replica.stop()


async def holder(stack: Stack) -> str:
    """The instance that took the newest group."""
    _, newest = [
        (entry, fields) for entry, fields in stack.redis.xrange(stack.keys.events) if fields[b"kind"] == b"taken"
    ][-1]
    return newest[b"instance"].decode()

"""A trainer in two processes, as the example has it, over a real broker."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.stacks import EachRow, Gates, Row, Stack, until, within

ROOT = Path(__file__).parents[2]


async def scored(row: Row) -> Row:
    if row["responses_create_params"]["input"] == "bad":
        raise ValueError("unlucky")
    return {"reward": float(row["_rowidx"])}


async def begun(stack: Stack, role: str, rows: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "examples.split_trainer", role, stack.broker.url, stack.run, str(rows), "2",
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip


async def example(stack: Stack, role: str, rows: Path) -> list[dict[str, Any]]:
    """What one half says, as it ends."""
    process = await begun(stack, role, rows)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return [json.loads(line) for line in said.splitlines()]


def written(path: Path, prompts: list[str]) -> Path:
    rows = [{"responses_create_params": {"input": prompt}, "agent_ref": {"name": "a"}} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@within(60)
async def test_one_process_publishes_and_another_collects(stack: Stack, tmp_path: Path) -> None:
    """A publisher that is started again, because it died, doubles nothing."""
    rows = written(tmp_path / "prompts.jsonl", ["x", "y", "bad", "z"])
    stack.host()
    collecting = asyncio.create_task(example(stack, "collect", rows))
    sealed = {"sealed": "step-1", "groups": 4}
    assert await example(stack, "publish", rows) == [sealed]
    assert await example(stack, "publish", rows) == [sealed]
    environment = EachRow(scored)
    await stack.worker(environment, data_attempts=1)
    *groups, books = await collecting
    assert books == {"published": 4, "completed": 3, "failed": 1}
    rewards = {group["group"]: group["rewards"] for group in groups if "rewards" in group}
    assert rewards == {0: [0.0, 1.0], 1: [2.0, 3.0], 3: [6.0, 7.0]}
    (failed,) = [group for group in groups if "failed" in group]
    assert "ValueError: unlucky (test_split_trainer.py, line" in failed["failed"]
    assert sorted({*environment.ran}) == list(range(8))
    assert stack.keys_of("step-1") == []


@within(60)
async def test_a_collector_that_is_started_again_goes_on_where_it_was(stack: Stack, tmp_path: Path) -> None:
    """It told groups as failed that the one before it had handed over."""
    rows = written(tmp_path / "prompts.jsonl", ["x", "bad", "y", "z"])
    stack.host()
    gates = Gates()

    async def held(row: Row) -> Row:
        await gates[row["_rowidx"] // 2].wait()
        return await scored(row)

    await stack.worker(EachRow(held), data_attempts=1)
    await example(stack, "publish", rows)
    gates.open(0, 1)
    first = await begun(stack, "collect", rows)
    assert first.stdout is not None
    told = {json.loads(await first.stdout.readline())["group"] for _ in range(2)}
    key = stack.keys.batch("step-1")
    await until(lambda: stack.redis.hget(key, "g:0").split()[0] == b"handed")
    await until(lambda: stack.redis.hget(key, "g:1").split()[2] == b"told")
    first.kill()
    await first.communicate()
    gates.open(2, 3)
    *groups, books = await example(stack, "collect", rows)
    assert told == {0, 1}
    assert {group["group"] for group in groups if "rewards" in group} == {2, 3}
    assert (len(groups), books) == (2, {"published": 4, "completed": 3, "failed": 1})

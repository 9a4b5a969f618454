"""Long-tailed rollouts over four replicas with limited slots: pull against static round-robin and the lower bound.

Pull is one shard of four replicas, where whoever is free takes the next group. Static round-robin is the same product
as four shards of one replica each, with the groups dealt in turn, so that nobody takes another's. The bound knows all
durations beforehand; `in_order` is what one queue that does not would give at no cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncGenerator
from typing import Any

from rolloutbus.trainer import CompletedGroup, RolloutClient

from benchmarks.contest import BenchmarkError
from benchmarks.figures import in_order, lower_bound
from benchmarks.results import MakespanPoint
from benchmarks.stage import RUN, staged

REPLICAS = 4
# With many slots the batch ends with whichever straggler began last; with few, how the work is shared decides.
SLOTS = (2, 8)
GROUPS = 400
GROUP_SIZE = 4
MEDIAN_S = 0.05
SIGMA = 1.0
STRAGGLERS = 0.02
STRAGGLER_S = 20 * MEDIAN_S
SEEDS = (1, 2, 3)


def durations(seed: int, groups: int = GROUPS) -> list[float]:
    """Seconds of each group: lognormal, and a few stragglers in random places."""
    source = random.Random(seed)
    found = [source.lognormvariate(math.log(MEDIAN_S), SIGMA) for _ in range(groups)]
    for straggler in source.sample(range(groups), round(groups * STRAGGLERS)):
        found[straggler] = STRAGGLER_S
    return found


def rows_of(groups: list[float], shards: int) -> list[dict[str, Any]]:
    """The groups' rows, dealt to the shards in turn; a group's time is spread over its rows."""
    return [
        {
            "kind": "tiny",
            "agent_ref": {"name": f"route{at % shards}"},
            "responses_create_params": {"input": "x"},
            "sleep_s": seconds / GROUP_SIZE,
        }
        for at, seconds in enumerate(groups)
        for _ in range(GROUP_SIZE)
    ]


def makespan() -> list[MakespanPoint]:
    """A point for each number of slots and seed, both arrangements in turns."""
    return [point for slots in SLOTS for point in asyncio.run(_points(slots))]


async def _points(slots: int) -> list[MakespanPoint]:
    async with _arranged(1, REPLICAS, slots) as pull, _arranged(REPLICAS, 1, slots) as static:
        await _seconds(pull, durations(0, groups=64), 1)
        await _seconds(static, durations(0, groups=64), REPLICAS)
        return [await _point(slots, seed, pull, static) for seed in SEEDS]


@contextlib.asynccontextmanager
async def _arranged(shards: int, replicas: int, slots: int) -> AsyncGenerator[RolloutClient, None]:
    with staged("unix", shards, replicas, slots) as stage:
        async with RolloutClient.connect(stage.url, run=RUN) as client:
            yield client


async def _point(slots: int, seed: int, pull: RolloutClient, static: RolloutClient) -> MakespanPoint:
    groups = durations(seed)
    return MakespanPoint(
        slots=slots,
        seed=seed,
        bound_s=lower_bound(groups, REPLICAS * slots),
        in_order_s=in_order(groups, REPLICAS * slots),
        pull_s=await _seconds(pull, groups, 1),
        static_s=await _seconds(static, groups, REPLICAS),
    )


async def _seconds(client: RolloutClient, groups: list[float], shards: int) -> float:
    """From the call until the last group is handed out."""
    rows, done = rows_of(groups, shards), 0
    started = time.perf_counter()
    async with client.run_groups(rows, GROUP_SIZE) as batch:
        async for group in batch:
            done += isinstance(group, CompletedGroup)
        elapsed = time.perf_counter() - started
    if done != len(groups):
        raise BenchmarkError(f"{done} groups came back of {len(groups)}")
    return elapsed

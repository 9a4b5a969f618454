"""Many one-group batches at once through one client: how fast, and what they hold on the broker and in this process.

A key that is left after them is a `BenchmarkError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil
from rolloutbus.broker.keys import Keys
from rolloutbus.trainer import Batch, CompletedGroup, RolloutClient

from benchmarks.contest import BenchmarkError
from benchmarks.figures import percentile
from benchmarks.payloads import GROUP_SIZE, make_rows
from benchmarks.results import CrowdPoint
from benchmarks.stage import RUN, staged

# Not fully typed.
redis: Any = importlib.import_module("redis")

CROWDS = [1, 10, 100, 1_000]
# For each crowd, so that each has as many latencies.
BATCHES = 2_000
PUBLISHED_WITHIN_S = 60.0


def crowd() -> list[CrowdPoint]:
    """A point for each number of batches at once, all through the same client."""
    with staged(shards=1) as stage, redis.Redis.from_url(stage.url) as probe:
        return asyncio.run(_points(stage.url, probe))


async def _points(url: str, probe: Any) -> list[CrowdPoint]:
    async with RolloutClient.connect(url, run=RUN) as client:
        await _one_batch(client)
        return [await _point(client, probe, size) for size in CROWDS]


async def _point(client: RolloutClient, probe: Any, size: int) -> CrowdPoint:
    before = _keys(probe)
    started = time.perf_counter()
    latencies = await _in_turns(client, size, BATCHES // size)
    batches_per_s = len(latencies) / (time.perf_counter() - started)
    held = await _held(client, probe, size)
    after = _keys(probe)
    if left := sorted(after - before):
        raise BenchmarkError(f"{size} one-group batches left {len(left)} keys on the broker, such as {left[0]}")
    return CrowdPoint(
        batches=size,
        batches_per_s=batches_per_s,
        p50_ms=percentile(latencies, 0.5) * 1000,
        p99_ms=percentile(latencies, 0.99) * 1000,
        keys_before=len(before),
        keys_after=len(after),
        **held,
    )


async def _in_turns(client: RolloutClient, size: int, each: int) -> list[float]:
    """`size` consumers side by side, each with `each` batches one after another; seconds of every batch."""

    async def consumer() -> list[float]:
        return [await _one_batch(client) for _ in range(each)]

    async with asyncio.TaskGroup() as tasks:
        consumers = [tasks.create_task(consumer()) for _ in range(size)]
    return [seconds for task in consumers for seconds in task.result()]


async def _one_batch(client: RolloutClient) -> float:
    """Seconds from the call to the batch's end."""
    rows = make_rows("1.5 KB", GROUP_SIZE, 1)
    started = time.perf_counter()
    async with client.run_groups(rows, GROUP_SIZE) as batch:
        groups = [group async for group in batch]
    if not (len(groups) == 1 and isinstance(groups[0], CompletedGroup)):
        raise BenchmarkError(f"a batch of one group gave {groups!r}")
    return time.perf_counter() - started


async def _held(client: RolloutClient, probe: Any, size: int) -> dict[str, int]:
    """The counts while `size` batches are open: their groups are published, none is consumed."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [client.run_groups(make_rows("1.5 KB", GROUP_SIZE, 1), GROUP_SIZE) for _ in range(size)]
        batches = [await stack.enter_async_context(batch) for batch in opened]
        await _all_published(probe, batches)
        counts = {
            "connections": len(probe.client_list()) - 1,  # without the probe's own
            "tasks": _tasks_of_other_threads(),
            "threads": threading.active_count(),
            "files": psutil.Process().num_fds(),
            "keys_open": len(_keys(probe)),
        }
        for batch in batches:
            async for _ in batch:
                pass
    return counts


async def _all_published(probe: Any, batches: Sequence[Batch[Any]]) -> None:
    """A batch is begun and published after its call has returned."""
    deadline = time.monotonic() + PUBLISHED_WITHIN_S
    for batch in batches:
        while probe.hget(Keys(RUN).batch(batch.id), "state") != b"sealed":
            if time.monotonic() > deadline:
                raise BenchmarkError(f"batch {batch.id} was not published within {PUBLISHED_WITHIN_S:g} s")
            await asyncio.sleep(0.01)


def _tasks_of_other_threads() -> int:
    """Unfinished tasks outside this loop, that is, in the client's thread, which does not show its loop."""
    here = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Any]] = [found for found in gc.get_objects() if type(found) is asyncio.Task]
    return sum(not task.done() and task.get_loop() is not here for task in tasks)


def _keys(probe: Any) -> set[str]:
    found: list[bytes] = list(probe.scan_iter(count=1000))
    return {key.decode() for key in found}

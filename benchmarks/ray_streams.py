"""The peer: one Ray actor per shard with a streaming generator, merged in the driver. Nothing of rolloutbus.

What stands in the broker's place, for CPU time and memory, are Ray's raylet and its global control store.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import ray

from benchmarks.contest import Measurement, Order, Progress, Rows, paced, serve
from benchmarks.payloads import make_result

RAYS_OWN = ("raylet", "gcs_server")


@ray.remote(num_cpus=0.1)
class Environment:
    """An environment that does nothing, behind a streaming generator."""

    def pid(self) -> int:
        return os.getpid()

    async def run_rollouts(self, rows: list[dict[str, Any]]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        for row in rows:
            yield row["_rowidx"], make_result(row)


async def merged(streams: list[Any]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Rows of all streams as they complete."""
    pending: dict[asyncio.Future[Any], Any] = {asyncio.ensure_future(_next(stream)): stream for stream in streams}
    while pending:
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            stream = pending.pop(task)
            try:
                reference = task.result()
            except StopAsyncIteration:
                continue
            yield await reference
            pending[asyncio.ensure_future(_next(stream))] = stream


async def _next(stream: Any) -> Any:
    return await anext(stream)


def open_streams(actors: list[Any], rows: Rows) -> list[Any]:
    buckets: list[list[dict[str, Any]]] = [[] for _ in actors]
    for row in rows:
        buckets[int(row["agent_ref"]["name"].removeprefix("route")) % len(actors)].append(row)
    return [
        actor.run_rollouts.options(num_returns="streaming").remote(bucket).__aiter__()
        for actor, bucket in zip(actors, buckets, strict=True)
        if bucket
    ]


async def run_batch(actors: list[Any], order: Order, rows: Rows) -> Measurement:
    """One batch; its rows come one by one, there are no groups here."""
    progress = Progress()
    async for _ in merged(open_streams(actors, rows)):
        progress.add()
    return progress.measured(order.rows)


async def run_paced(actors: list[Any], order: Order, rows: Rows) -> Measurement:
    async def one(index: int) -> float:
        overhead_ms = 0.0
        async for _, result in merged(open_streams(actors, [rows[index]])):
            overhead_ms = (time.time() - result["done"]) * 1000
        return overhead_ms

    return await paced(order, one)


def rays_own() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True) if child.name() in RAYS_OWN]


async def main() -> None:
    actors: list[Any] = [Environment.remote() for _ in range(2)]  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType]
    workers: list[int] = [await actor.pid.remote() for actor in actors]

    async def run(order: Order, rows: Rows) -> Measurement:
        return await (run_paced if order.rate else run_batch)(actors, order, rows)

    await serve(run, {"broker": rays_own(), "workers": workers, "trainer": [os.getpid()]})


if __name__ == "__main__":
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # pyright: ignore[reportUnknownMemberType]
    asyncio.run(main())

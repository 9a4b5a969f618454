"""The peer: one Ray actor per shard with a streaming generator, merged in the driver. Nothing of rolloutbus."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import ray

from benchmarks.contest import Measurement, Meter, Order, pace, serve
from benchmarks.payloads import make_result, make_rows


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


def open_streams(actors: list[Any], rows: list[dict[str, Any]]) -> list[Any]:
    buckets: list[list[dict[str, Any]]] = [[] for _ in actors]
    for row in rows:
        buckets[int(row["agent_ref"]["name"].removeprefix("route")) % len(actors)].append(row)
    return [
        actor.run_rollouts.options(num_returns="streaming").remote(bucket).__aiter__()
        for actor, bucket in zip(actors, buckets, strict=True)
        if bucket
    ]


async def run_batch(actors: list[Any], order: Order) -> tuple[float, float]:
    rows = make_rows(order.kind, order.rows, order.shards)
    started, first, count = time.perf_counter(), 0.0, 0
    async for _ in merged(open_streams(actors, rows)):
        first = first or time.perf_counter() - started
        count += 1
    assert count == order.rows
    return count / (time.perf_counter() - started), first * 1000


async def run_paced(actors: list[Any], order: Order) -> list[float]:
    overheads: list[float] = []
    started = time.perf_counter()

    async def one() -> None:
        async for _, result in merged(open_streams(actors, make_rows(order.kind, 1, 1))):
            overheads.append((time.time() - result["done"]) * 1000)

    tasks: list[asyncio.Task[None]] = []
    for index in range(order.rows):
        await asyncio.sleep(pace(started, index, order.rate))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return overheads


async def main() -> None:
    actors: list[Any] = [Environment.remote() for _ in range(2)]  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType]
    workers: list[int] = [await actor.pid.remote() for actor in actors]
    roles = {"workers": workers, "trainer": [os.getpid()]}

    async def run(order: Order) -> Measurement:
        meter = Meter(roles)
        if order.rate:
            return Measurement(order.rate, 0.0, meter.cpu(), meter.memory(), await run_paced(actors, order))
        rate, first = await run_batch(actors, order)
        return Measurement(rate, first, meter.cpu(), meter.memory())

    await serve(run)


if __name__ == "__main__":
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # pyright: ignore[reportUnknownMemberType]
    asyncio.run(main())

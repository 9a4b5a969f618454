"""rolloutbus through its public API: a server, worker processes, one client.

`python -m benchmarks.product [unix|tcp|aof]`
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.shard_records import instance_labels
from rolloutbus.trainer import CompletedGroup, RolloutClient

from benchmarks.contest import Measurement, Meter, Order, pace, serve
from benchmarks.payloads import group_size, make_rows

# Not fully typed.
redis: Any = importlib.import_module("redis")

RUN = "bench"


def publish_routes(url: str, shards: int, replicas: int) -> None:
    """What a fleet would publish."""
    keys = Keys(RUN)
    with redis.Redis.from_url(url) as connection:
        connection.hset(keys.routes, mapping={f"route{at}": f"shard{at}" for at in range(shards)})
        for at in range(shards):
            connection.hset(keys.shards, f"shard{at}", json.dumps({"replicas": replicas}))


def start_workers(url: str, shards: int, replicas: int, slots: int) -> list[subprocess.Popen[bytes]]:
    """One process per replica; returns when all show signs of life."""
    labels = [(f"shard{at}", label) for at in range(shards) for label in instance_labels(f"shard{at}", replicas)]
    workers = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.noop_worker", url, RUN, shard, label, str(slots)])
        for shard, label in labels
    ]
    with redis.Redis.from_url(url) as connection:
        while connection.exists(*(Keys(RUN).instance(label) for _, label in labels)) < len(labels):
            time.sleep(0.05)
    return workers


async def run_batch(client: RolloutClient, order: Order) -> tuple[float, float]:
    """Rows per second and milliseconds to the first group of one batch."""
    rows = make_rows(order.kind, order.rows, order.shards)
    started, first, count = time.perf_counter(), 0.0, 0
    async with client.run_groups(rows, group_size(order.kind)) as batch:
        async for group in batch:
            assert isinstance(group, CompletedGroup)
            first = first or time.perf_counter() - started
            count += len(group.results)
    assert count == order.rows
    return count / (time.perf_counter() - started), first * 1000


async def run_paced(client: RolloutClient, order: Order) -> list[float]:
    """Single-row groups at `order.rate`: milliseconds from the moment each is done to the moment it is handed out."""
    overheads: list[float] = []
    started = time.perf_counter()

    async def one(index: int) -> None:
        rows = make_rows(order.kind, 1, 1)
        async with client.run_groups(rows, 1) as batch:
            async for group in batch:
                assert isinstance(group, CompletedGroup)
                overheads.append((time.time() - group.results[0]["done"]) * 1000)

    tasks: list[asyncio.Task[None]] = []
    for index in range(order.rows):
        await asyncio.sleep(pace(started, index, order.rate))
        tasks.append(asyncio.create_task(one(index)))
    await asyncio.gather(*tasks)
    return overheads


async def main(transport: str) -> None:
    binary = shutil.which("redis-server")
    persistence = "everysec" if transport == "aof" else "none"
    with EmbeddedBroker(binary=binary, tcp=transport == "tcp", persistence=persistence) as broker:
        publish_routes(broker.url, 2, 1)
        workers = start_workers(broker.url, 2, 1, slots=64)
        roles = {"broker": [broker.pid or 0], "workers": [worker.pid for worker in workers], "trainer": [os.getpid()]}
        async with RolloutClient.connect(broker.url, run=RUN) as client:

            async def run(order: Order) -> Measurement:
                meter = Meter(roles)
                if order.rate:
                    return Measurement(order.rate, 0.0, meter.cpu(), meter.memory(), await run_paced(client, order))
                rate, first = await run_batch(client, order)
                return Measurement(rate, first, meter.cpu(), meter.memory())

            await serve(run)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "unix"))

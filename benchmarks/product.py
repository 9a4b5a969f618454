"""rolloutbus through its public API: a server, worker processes, one client.

`python -m benchmarks.product [unix|tcp|aof [SHARDS [REPLICAS]]]`, replicas per shard.
"""

from __future__ import annotations

import asyncio
import sys
import time

from rolloutbus.trainer import CompletedGroup, RolloutClient

from benchmarks.contest import Measurement, Order, Progress, Rows, paced, serve
from benchmarks.payloads import group_size
from benchmarks.stage import RUN, staged


async def run_batch(client: RolloutClient, order: Order, rows: Rows) -> Measurement:
    """One batch, taken as whole groups or, with `by_row`, as single rows."""
    progress = Progress()
    run = client.run_rollouts if order.by_row else client.run_groups
    async with run(rows, group_size(order.kind)) as batch:
        async for item in batch:
            progress.add(len(item.results) if isinstance(item, CompletedGroup) else 1)
    return progress.measured(order.rows)


async def run_paced(client: RolloutClient, order: Order, rows: Rows) -> Measurement:
    """Single-row groups at `order.rate`: milliseconds from the moment each is done to the moment it is handed out."""

    async def one(index: int) -> float:
        overhead_ms = 0.0
        async with client.run_groups([rows[index]], 1) as batch:
            async for group in batch:
                assert isinstance(group, CompletedGroup)
                overhead_ms = (time.time() - group.results[0]["done"]) * 1000
        return overhead_ms

    return await paced(order, one)


async def main(transport: str = "unix", shards: str = "2", replicas: str = "1") -> None:
    with staged(transport, int(shards), int(replicas)) as stage:
        async with RolloutClient.connect(stage.url, run=RUN) as client:

            async def run(order: Order, rows: Rows) -> Measurement:
                return await (run_paced if order.rate else run_batch)(client, order, rows)

            await serve(run, stage.roles)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

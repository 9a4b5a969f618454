"""What the broker's memory grows by for each byte of results that wait there for a trainer that does not ask."""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

from rolloutbus.broker.keys import Keys
from rolloutbus.trainer import Batch, RolloutClient

from benchmarks.contest import BenchmarkError
from benchmarks.payloads import COMPARED, group_size, make_rows
from benchmarks.results import HeldPoint
from benchmarks.stage import RUN, staged

# Not fully typed.
redis: Any = importlib.import_module("redis")

# Beside so much the server's own few megabytes are nothing; the client's bound is above it.
OUTSTANDING_BYTES = 64 << 20
ROW_BYTES = {"1.5 KB": 1_600, "64 KB numpy": 65_536, "token lists": 50_000, "1 MB numpy": 1 << 20}
# Goal: memory per byte that is outstanding.
MEMORY_GOAL = 1.3
ALL_DONE_WITHIN_S = 60.0


def held() -> list[HeldPoint]:
    """A point for each payload of which a row has a size; every one with a server of its own."""
    return [_point(kind) for kind in COMPARED if kind in ROW_BYTES]


def _point(kind: str) -> HeldPoint:
    with staged() as stage, redis.Redis.from_url(stage.url) as probe:
        return asyncio.run(_measured(stage.url, probe, kind))


async def _measured(url: str, probe: Any, kind: str) -> HeldPoint:
    size = group_size(kind)
    rows = make_rows(kind, max(size, OUTSTANDING_BYTES // ROW_BYTES[kind] // size * size), 2)
    async with RolloutClient.connect(url, run=RUN) as client:
        async with client.run_groups(make_rows(kind, size, 2), size) as warm_up:
            async for _ in warm_up:
                pass
        before = _used_bytes(probe)
        async with client.run_groups(rows, size) as batch:
            outstanding = await _all_outstanding(probe, batch, len(rows) // size)
            grown = _used_bytes(probe) - before
            async for _ in batch:
                pass
    return HeldPoint(kind=kind, outstanding_mb=outstanding / 1e6, per_byte=grown / outstanding)


async def _all_outstanding(probe: Any, batch: Batch[Any], groups: int) -> int:
    """Bytes of results on the broker once every group has ended; nobody has asked for one."""
    deadline = time.monotonic() + ALL_DONE_WITHIN_S
    while True:
        completed, unread = probe.hmget(Keys(RUN).batch(batch.id), "completed", "unread_bytes")
        # Replies to the client's reads are no outstanding results, and wait in the server's memory too.
        if int(completed or 0) == groups and not any(int(one["omem"]) for one in probe.client_list()):
            return int(unread)
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{int(completed or 0)} of {groups} groups ended within {ALL_DONE_WITHIN_S:g} s")
        await asyncio.sleep(0.05)


def _used_bytes(probe: Any) -> int:
    return int(probe.info("memory")["used_memory"])

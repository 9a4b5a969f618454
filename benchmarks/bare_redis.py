"""Bare Redis Streams with redis-py and none of the guarantees; nothing of rolloutbus but the server's supervision."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from typing import Any, cast

import numpy as np

from benchmarks.contest import Measurement, Order, Progress, Rows, serve
from benchmarks.payloads import group_size
from benchmarks.stage import server

# Neither is fully typed.
msgpack: Any = importlib.import_module("msgpack")
redis: Any = importlib.import_module("redis.asyncio")
# A gigabyte of prompts goes in one write; on a slow day that takes longer than the library waits by itself.
WRITE_WITHIN_S = 60.0


def unpack_array(code: int, data: bytes) -> Any:
    kind, _, raw = data.partition(b"|")
    return cast("Any", np).frombuffer(raw, dtype=kind.decode())


async def publish(connection: Any, rows: Rows, size: int) -> None:
    pipe = connection.pipeline(transaction=False)
    for first in range(0, len(rows), size):
        shard = rows[first]["agent_ref"]["name"]
        pipe.xadd(f"groups:{shard}", {"payload": msgpack.packb(rows[first : first + size])})
        if first % (size * 64) == 0:
            await pipe.execute()
    await pipe.execute()


async def run_batch(connection: Any, reader: Any, cursors: dict[str, str], order: Order, rows: Rows) -> Measurement:
    progress = Progress()
    publishing = asyncio.create_task(publish(connection, rows, group_size(order.kind)))
    count = 512 if order.kind == "1.5 KB" else 16
    while progress.rows < order.rows:
        reply: Any = await reader.xread(cursors, count=count, block=1000)
        found: list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]] = reply or []
        for name, entries in found:
            for entry, fields in entries:
                msgpack.unpackb(fields[b"payload"], ext_hook=unpack_array)
                progress.add()
                cursors[name.decode()] = entry.decode()
    await publishing
    measurement = progress.measured(order.rows)
    for name in cursors:
        await connection.xtrim(name, maxlen=0)
    return measurement


def start_worker(url: str, shard: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.bare_worker", url, shard])


async def main() -> None:
    with server() as broker:
        connection, reader = (redis.Redis.from_url(broker.url, socket_timeout=WRITE_WITHIN_S) for _ in range(2))
        for at in range(2):
            await connection.xgroup_create(f"groups:route{at}", "g", id="0", mkstream=True)
        workers = [start_worker(broker.url, f"route{at}") for at in range(2)]
        cursors = {f"results:route{at}": "0-0" for at in range(2)}
        roles = {"broker": [broker.pid or 0], "workers": [worker.pid for worker in workers], "trainer": [os.getpid()]}

        async def run(order: Order, rows: Rows) -> Measurement:
            return await run_batch(connection, reader, cursors, order, rows)

        await serve(run, roles)
        await connection.set("stop", 1)
        for worker in workers:
            worker.wait()
        await connection.aclose()
        await reader.aclose()


if __name__ == "__main__":
    asyncio.run(main())

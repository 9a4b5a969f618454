"""A shard worker as a process, for tests that kill, stop and continue it; see `stacks.WorkerProcess`.

Each rollout is told on standard output when it starts and ends. Orders come on standard input, one JSON list a line:
`["go"]` lets all rows go on, `["go", 3]` one row, `["drain"]` drains; the end of input stops the worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers.worker import ShardWorker
from rolloutbus.shard_workers.worker_settings import WorkerSettings

from tests.stacks import EachRow, Row


def tell(event: str, **words: Any) -> None:
    print(json.dumps({"event": event, "pid": os.getpid(), **words}), flush=True)


class Gate:
    """What rows wait at while they are held."""

    def __init__(self, hold: bool) -> None:
        self._all = asyncio.Event()
        self._rows: dict[int, asyncio.Event] = {}
        if not hold:
            self._all.set()

    def open(self, row: int | None = None) -> None:
        events = [self._all, *self._rows.values()] if row is None else [self._row(row)]
        for event in events:
            event.set()

    def _row(self, row: int) -> asyncio.Event:
        return self._rows.setdefault(row, asyncio.Event())

    async def passing(self, row: int) -> None:
        if not self._all.is_set():
            await self._row(row).wait()


async def listen(gate: Gate, worker: ShardWorker) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        order, *words = json.loads(line)
        if order == "go":
            gate.open(*words)
        elif order == "drain":
            worker.drain()
    transport.close()
    gate.open()
    worker.stop()


async def main(order: dict[str, Any]) -> None:
    gate = Gate(order["hold"])

    async def rollout(row: Row) -> Row:
        index = row["_rowidx"]
        tell("row", row=index, group_id=row["_group_id"])
        await gate.passing(index)
        tell("end", row=index)
        return {"row": index, "group_id": row["_group_id"], "pid": os.getpid()}

    worker = ShardWorker(
        BrokerSettings(**order["broker"]),
        order["run"],
        order["shard"],
        order["label"],
        EachRow(rollout),
        WorkerSettings(**order["worker"]),
    )
    tell("started", consumer=worker.identity.consumer)
    orders = asyncio.create_task(listen(gate, worker))
    await worker.run()
    orders.cancel()
    await asyncio.gather(orders, return_exceptions=True)
    tell("statistics", **worker.statistics().ended)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

"""Redis Streams with this product's codec and writer, blocking sockets, whole groups, and none of the guarantees: how
far the guarantees, and all that runs beside one another for them, are from what this machine can do.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys

from rolloutbus.broker import codec
from rolloutbus.broker.channel import Payload
from rolloutbus.broker.messages import unframe

from benchmarks.contest import Measurement, Order, Progress, Rows, serve
from benchmarks.payloads import group_size
from benchmarks.stage import server
from benchmarks.thin_connection import Command, Connection, Found

ROUTES = ("route0", "route1")
# More make small rows faster, and large ones slower.
READ_AT_ONCE = {"1.5 KB": 64}
READ_AT_MOST = 4
PUBLISHED_AT_ONCE = 64


class Publisher:
    """Writes a batch's groups a few at a time."""

    def __init__(self, connection: Connection, rows: Rows, size: int) -> None:
        self._connection = connection
        self._left = iter([(at, rows[at : at + size]) for at in range(0, len(rows), size)])

    def some(self) -> None:
        commands: list[Command] = []
        for first, rows in itertools.islice(self._left, PUBLISHED_AT_ONCE):
            payload = Payload.of(codec.encode_rows(rows, first_row=first))
            commands.append(("XADD", f"groups:{rows[0]['agent_ref']['name']}", "*", "payload", payload))
        self._connection.ask(commands)


def run_batch(writer: Connection, reader: Connection, order: Order, rows: Rows) -> Measurement:
    progress = Progress()
    publisher = Publisher(writer, rows, group_size(order.kind))
    publisher.some()
    cursors: dict[str, bytes] = {f"results:{route}": b"0-0" for route in ROUTES}
    count = READ_AT_ONCE.get(order.kind, READ_AT_MOST)
    handed: list[Command] = []
    while progress.rows < order.rows:
        read = ("XREAD", "COUNT", count, "BLOCK", 1000, "STREAMS", *cursors, *cursors.values())
        reader.send([*handed, read])
        publisher.some()
        reader.receive(len(handed))
        handed = []
        found: Found = reader.receive(1)[0] or []
        for name, entries in found:
            stream = name.decode()
            cursors[stream] = entries[-1][0]
            handed.append(("XDEL", stream, *[entry for entry, _ in entries]))
            for _, fields in entries:
                progress.add(len([codec.decode(payload) for payload in unframe(fields[-1])]))
    measurement = progress.measured(order.rows)
    reader.ask(handed)
    return measurement


def start_worker(url: str, route: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.thin_worker", url, route])


async def main() -> None:
    with server() as broker:
        writer, reader = Connection(broker.url), Connection(broker.url, large=True)
        writer.ask([("XGROUP", "CREATE", f"groups:{route}", "workers", "0", "MKSTREAM") for route in ROUTES])
        workers = [start_worker(broker.url, route) for route in ROUTES]
        roles = {"broker": [broker.pid or 0], "workers": [worker.pid for worker in workers], "trainer": [os.getpid()]}

        async def run(order: Order, rows: Rows) -> Measurement:
            return run_batch(writer, reader, order, rows)

        try:
            await serve(run, roles)
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait()


if __name__ == "__main__":
    asyncio.run(main())

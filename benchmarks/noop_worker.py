"""A worker process of the benchmark: the product's own worker loop around an environment that does nothing.

Run as `python -m benchmarks.noop_worker URL RUN SHARD LABEL SLOTS`; ends on SIGTERM, and with whoever holds the other
end of its standard input, if that is a pipe.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rolloutbus.broker import BrokerSettings
from rolloutbus.shard_workers import ShardWorker, WorkerSettings

from benchmarks.payloads import make_result

Row = dict[str, Any]


class NoopEnvironment:
    """Gives each row its result at once, or after the `sleep_s` that the row carries."""

    async def start(self, config: Mapping[str, Any]) -> None:
        """Nothing to build."""

    def list_entries(self) -> dict[str, list[str]]:
        return {}

    async def run_rollouts(self, rows: Sequence[Row]) -> AsyncIterator[tuple[Row, Row]]:
        for row in rows:
            if row.get("sleep_s"):
                await asyncio.sleep(row["sleep_s"])
            yield row, make_result(row)

    async def health(self) -> None:
        """Always well."""

    async def stop(self) -> None:
        """Nothing to end."""


async def main(url: str, run: str, shard: str, label: str, slots: int) -> None:
    settings = WorkerSettings(slots=slots, drain_timeout_s=0)
    worker = ShardWorker(BrokerSettings(url=url), run, shard, label, NoopEnvironment(), settings)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.stop)

    def leave() -> None:
        loop.remove_reader(sys.stdin)
        worker.stop()

    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        # Nothing is ever written to it, so it is readable only at its end.
        loop.add_reader(sys.stdin, leave)
    await worker.run()


if __name__ == "__main__":
    url, run, shard, label, slots = sys.argv[1:6]
    asyncio.run(main(url, run, shard, label, int(slots)))

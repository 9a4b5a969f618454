"""A worker with a Gym stack in a process of its own: `worker_program.py JSON`, with the broker's settings or the
stack alone.

It says `{"supervisor": pid}` when the stack is up and the worker reads, and works until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import psutil
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers.environments.nemo_gym import NemoGymEnvironment
from rolloutbus.shard_workers.worker import ShardWorker
from rolloutbus.shard_workers.worker_settings import WorkerSettings


async def main(order: dict[str, Any]) -> None:
    environment = NemoGymEnvironment()
    await environment.start(order["config"])
    try:
        [supervisor] = psutil.Process().children()
        print(json.dumps({"supervisor": supervisor.pid}), flush=True)
        if "broker" not in order:
            await asyncio.to_thread(sys.stdin.read)
            return
        settings = WorkerSettings(**order["worker"])
        worker = ShardWorker(
            BrokerSettings(**order["broker"]), order["run"], order["shard"], order["label"], environment, settings
        )
        working = asyncio.create_task(worker.run())
        await asyncio.to_thread(sys.stdin.read)
        worker.stop()
        await working
    finally:
        await environment.stop()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

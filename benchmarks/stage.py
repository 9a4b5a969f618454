"""A run of the product for measuring: a server, a worker process per replica, and nothing left when it ends.

Workers also end when the process that started them dies in any way, because their standard input ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.shard_records import instance_labels

from benchmarks.contest import BenchmarkError

# Not fully typed.
redis: Any = importlib.import_module("redis")

RUN = "bench"
SLOTS = 64
# Sixteen interpreters on two cores take several seconds.
WORKERS_READY_WITHIN_S = 60.0
WORKER_LEAVES_WITHIN_S = 10.0


@dataclass(frozen=True)
class Stage:
    """What runs, by its process ids; this process is the trainer."""

    url: str
    broker: int
    workers: list[int]

    @property
    def roles(self) -> dict[str, list[int]]:
        return {"broker": [self.broker], "workers": self.workers, "trainer": [os.getpid()]}


def server(transport: str = "unix") -> EmbeddedBroker:
    """The machine's own Redis where it has one, else the product's embedded server; not started yet.

    Transports: `unix`, `tcp`, and `aof`, a unix socket with the append-only file flushed each second.
    """
    persistence = "everysec" if transport == "aof" else "none"
    return EmbeddedBroker(binary=shutil.which("redis-server"), tcp=transport == "tcp", persistence=persistence)


@contextlib.contextmanager
def staged(
    transport: str = "unix", shards: int = 2, replicas: int = 1, slots: int = SLOTS
) -> Generator[Stage, None, None]:
    """A server with `shards` × `replicas` workers that have shown signs of life."""
    with server(transport) as broker, _workers(broker.url, shards, replicas, slots) as workers:
        yield Stage(broker.url, broker.pid or 0, [worker.pid for worker in workers])


@contextlib.contextmanager
def _workers(url: str, shards: int, replicas: int, slots: int) -> Generator[list[subprocess.Popen[bytes]], None, None]:
    labels = [(f"shard{at}", label) for at in range(shards) for label in instance_labels(f"shard{at}", replicas)]
    with contextlib.ExitStack() as stack, redis.Redis.from_url(url) as connection:
        _publish_routes(connection, shards, replicas)
        workers = [stack.enter_context(_worker(url, shard, label, slots)) for shard, label in labels]
        _await_signs(connection, [Keys(RUN).instance(label) for _, label in labels], workers)
        yield workers


def _publish_routes(connection: Any, shards: int, replicas: int) -> None:
    """What a fleet would publish."""
    keys = Keys(RUN)
    connection.hset(keys.routes, mapping={f"route{at}": f"shard{at}" for at in range(shards)})
    record = json.dumps({"replicas": replicas})
    connection.hset(keys.shards, mapping={f"shard{at}": record for at in range(shards)})


@contextlib.contextmanager
def _worker(url: str, shard: str, label: str, slots: int) -> Generator[subprocess.Popen[bytes], None, None]:
    command = [sys.executable, "-m", "benchmarks.noop_worker", url, RUN, shard, label, str(slots)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert worker.stdin is not None
    try:
        yield worker
    finally:
        worker.stdin.close()
        try:
            worker.wait(timeout=WORKER_LEAVES_WITHIN_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _await_signs(connection: Any, heartbeats: list[str], workers: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + WORKERS_READY_WITHIN_S
    while connection.exists(*heartbeats) < len(heartbeats):
        ended = [worker.args for worker in workers if worker.poll() is not None]
        if ended:
            raise BenchmarkError(f"a worker ended before it was ready, its error is above; it was {ended[0]}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"not all {len(heartbeats)} workers were ready within {WORKERS_READY_WITHIN_S:g} s")
        time.sleep(0.02)

"""A small run for one test: an embedded broker, workers in this process or in their own, and a client. All ends with
the test.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import redis
from rolloutbus.broker.channel import Link
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.worker_transitions import Identity, WorkerTransitions
from rolloutbus.collector import CompletedGroup
from rolloutbus.shard_workers import ShardWorker, WorkerSettings
from rolloutbus.trainer import RolloutClient
from rolloutbus.trainer.batch import GroupBatch

from tests.chaos.actors import Actor, Progress
from tests.chaos.proxy import Proxy

RUN = "arena"
SHARD = "s"
TIMES: dict[str, Any] = {
    "lease_s": 0.6,
    "renew_every_s": 0.1,
    "abandon_after_s": 20.0,
    "sweep_every_s": 0.2,
    "block_s": 0.2,
    "connect_timeout_s": 2.0,
    "command_timeout_s": 2.0,
    "reconnect_timeout_s": 10.0,
    "no_instance_timeout_s": 20.0,
}
Rows = Sequence[dict[str, Any]]
Outcome = tuple[dict[str, Any], Any]


def rows_of(groups: int, size: int, **words: Any) -> list[dict[str, Any]]:
    """Rows as the chaos worker's environment knows them too."""
    plain = {"ms": 5, "trouble": "", "filler": 10, **words}
    return [
        {"responses_create_params": {"input": "x"}, "agent_ref": {"name": "a"}, "key": str(at), **plain}
        for at in range(groups * size)
    ]


def echo(row: dict[str, Any]) -> dict[str, Any]:
    return {"row": row["_rowidx"]}


async def comes_true(ready: Callable[[], Any], within_s: float = 20.0) -> None:
    """Return once `ready` holds; for what only the broker knows, which tells nobody."""
    async with asyncio.timeout(within_s):
        while True:
            if ready():
                return
            await asyncio.sleep(0.02)


async def completed(batch: GroupBatch) -> list[CompletedGroup]:
    """All groups of a batch in which none fails."""
    groups = [group async for group in batch]
    assert all(isinstance(group, CompletedGroup) for group in groups), groups
    return [group for group in groups if isinstance(group, CompletedGroup)]


class Environment:
    """Hands each row to `roll`, one after the other, and remembers the groups it was asked for."""

    def __init__(self, roll: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self.groups: list[str] = []
        self._roll = roll or echo

    async def start(self, config: Mapping[str, Any]) -> None: ...

    def list_entries(self) -> dict[str, list[str]]:
        return {}

    async def run_rollouts(self, rows: Rows) -> AsyncIterator[Outcome]:
        self.groups.append(rows[0]["_group_id"])
        for row in rows:
            result = self._roll(row)
            yield row, (await result if asyncio.iscoroutine(result) else result)

    async def health(self) -> None: ...

    async def stop(self) -> None: ...


class Arena:
    """One run on one broker."""

    def __init__(self, broker: EmbeddedBroker, folder: Path, replicas: int = 2, **times: Any) -> None:
        self.broker = broker
        self.keys = Keys(RUN)
        self.times = {**TIMES, **times}
        self.settings = BrokerSettings(url=broker.url, **self.times)
        self.control: Any = cast(Any, redis).Redis.from_url(broker.url)
        self.progress = Progress()
        self.actors: list[Actor] = []
        self._folder = folder
        self._workers: list[tuple[ShardWorker, asyncio.Task[None]]] = []
        self._links: list[Link] = []
        self.control.hset(self.keys.routes, mapping={"a": SHARD, ":version": "1"})
        self.control.hset(self.keys.shards, SHARD, json.dumps({"replicas": replicas, "labels": ["s/0", "s/1", "s/2"]}))

    def worker(self, label: str, environment: Any, url: str = "", **how: Any) -> tuple[ShardWorker, asyncio.Task[None]]:
        """A worker in this process and event loop."""
        settings = BrokerSettings(url=url or self.broker.url, **self.times)
        worker = ShardWorker(settings, RUN, SHARD, label, environment, _quick(how))
        task = asyncio.create_task(worker.run())
        self._workers.append((worker, task))
        return worker, task

    def build(self, label: str, environment: Any, **how: Any) -> ShardWorker:
        """A worker that is not running yet."""
        return ShardWorker(self.settings, RUN, SHARD, label, environment, _quick(how))

    async def process(self, label: str, kill_at: Any = None, **how: Any) -> Actor:
        """A worker in a process of its own, that of the chaos driver."""
        actor = Actor("worker_process", label, self.progress, self._folder)
        self.actors.append(actor)
        orders = {"url": self.broker.url, "run": RUN, "shard": SHARD, "label": label, "settings": self.times}
        worker = {"commit": "row", "slots": 4, "retry_backoff_s": 0.05, **how}
        await actor.start({**orders, "worker": worker, "kill_at": kill_at, "drain_s": 1.0})
        await self.progress.until(lambda: actor.up or actor.gone)
        return actor

    def client(self, url: str = "", **options: Any) -> RolloutClient:
        return RolloutClient.connect(url or self.broker.url, run=RUN, settings=self.times, **options)

    def transitions(self, label: str) -> WorkerTransitions:
        """A worker's steps without a worker around them."""
        link = Link(self.settings, f"test:{label}", load_scripts)
        self._links.append(link)
        return WorkerTransitions(link, self.keys, self.settings, Identity(SHARD, label, f"i-{label[-1]}"))

    async def sealed(self, batch: str) -> None:
        """Return once all groups of the batch are published."""
        await comes_true(lambda: self.control.hget(self.keys.batch(batch), "state") == b"sealed")

    async def end(self) -> None:
        for worker, _ in self._workers:
            worker.stop()
        await asyncio.gather(*(task for _, task in self._workers), return_exceptions=True)
        self._workers.clear()
        for link in self._links:
            await link.close()
        for actor in self.actors:
            actor.signal(signal.SIGCONT)
            await actor.end(signal.SIGKILL, 10)
        self.control.close()


def _quick(how: dict[str, Any]) -> WorkerSettings:
    settings: dict[str, Any] = {"retry_backoff_s": 0.05, **how}
    return WorkerSettings(**settings)


@asynccontextmanager
async def arena_on(
    folder: Path, persistence: Any = "none", tcp: bool = False, **times: Any
) -> AsyncGenerator[Arena, None]:
    """An arena on a broker of its own; nothing of it is left behind."""
    broker = EmbeddedBroker(persistence=persistence, tcp=tcp)
    await asyncio.to_thread(broker.start)
    arena = Arena(broker, folder, **times)
    try:
        yield arena
    finally:
        await arena.end()
        await asyncio.to_thread(broker.stop)


@asynccontextmanager
async def proxy_to(arena: Arena) -> AsyncGenerator[Proxy, None]:
    """A proxy in front of the arena's broker."""
    proxy = Proxy(arena.broker.url, random.Random(1))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()

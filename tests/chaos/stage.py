"""Where a schedule plays: broker, workers, trainer, proxies where the fault needs them, the driver's own connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import psutil
import redis.asyncio
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.keys import Keys

from tests.chaos.actors import Actor, Progress
from tests.chaos.child import now_ms
from tests.chaos.evidence import Process, holds_of
from tests.chaos.plan import MANY_ATTEMPTS, Plan
from tests.chaos.proxy import Proxy
from tests.chaos.spans import Span

RUN = "chaos"
PROXIED = ("net-silent", "net-reset", "net-slow", "mixed")
DRAIN_S = 1.0
PATIENCE_S = 15.0
WORKER_SETTINGS = {"infra_attempts": MANY_ATTEMPTS, "retry_backoff_s": 0.1, "cancel_grace_s": 1.0}


class Stage:
    """Everything that one schedule starts; `struck` begins to measure the time from a fault to progress after it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.keys = Keys(RUN)
        self.progress = Progress()
        self.workers: dict[str, Actor] = {}
        self.trainer: Actor | None = None
        self.proxies: dict[str, Proxy] = {}
        self.retired: list[Actor] = []
        self.complaints: list[str] = []
        self.recoveries: list[float] = []
        self.disturbed: list[Span] = []
        self.trainer_crashed = self.data_lost = self.trainer_gone = False
        self.journal_path = folder / "journal.jsonl"
        self._folder = folder
        self._watches: set[asyncio.Task[None]] = set()
        self.broker = EmbeddedBroker(directory=folder / "broker", persistence=cast(Any, plan.persistence), tcp=plan.tcp)
        self._servers: list[psutil.Process] = []
        self.aof_sizes: list[tuple[float, int]] = []

    def processes(self) -> list[psutil.Process]:
        """Every process of this schedule so far that could still be looked up."""
        return [actor.process for actor in self.actors() if actor.process is not None] + self._servers

    def actors(self) -> list[Actor]:
        return [*self.workers.values(), *self.retired, *([self.trainer] if self.trainer else [])]

    @contextlib.contextmanager
    def disturbance(self) -> Generator[None]:
        """While the fault makes everything wait, which is nobody's fault then."""
        began = now_ms()
        try:
            yield
        finally:
            self.disturbed.append((began, now_ms()))

    async def restart_broker(self) -> None:
        """Start the broker, again or for the first time."""
        await asyncio.to_thread(self.broker.restart)
        for pid in (self.broker.pid, self.broker.supervisor_pid):
            assert pid is not None
            self._servers.append(psutil.Process(pid))

    async def start(self, kill_worker_at: dict[str, Any], kill_trainer_at: Any) -> None:
        await self.restart_broker()
        await self.write_run()
        await asyncio.gather(*(self.add_worker(label, kill_worker_at.get(label)) for label in self.plan.labels))
        await self.start_trainer(kill_trainer_at)

    def witnesses(self) -> list[Process]:
        """What all workers told, and what was done to them."""
        workers = [actor for actor in [*self.workers.values(), *self.retired] if actor.name != "trainer"]
        return [
            Process(at.name, at.up_at, at.gone_at, at.unable, at.unheard, holds_of(at.lines, at.gone_at))
            for at in workers
        ]

    def away(self) -> list[Span]:
        """When there was no trainer: between one's death and the coming of the next, and after the last."""
        trainers = [*(actor for actor in self.retired if actor.name == "trainer"), self.trainer]
        coming = [trainer.up_at for trainer in trainers[1:] if trainer] + [math.inf]
        return [(gone.gone_at, up) for gone, up in zip(trainers, coming, strict=True) if gone]

    def control(self) -> Any:
        """The driver's own connection, never through a proxy."""
        return cast(Any, redis.asyncio).Redis.from_url(self.broker.url, socket_timeout=5)

    async def write_run(self) -> None:
        """What a fleet would publish; again after the broker lost its data."""
        routes = {shard.name: shard.name for shard in self.plan.shards}
        records = {
            shard.name: json.dumps(
                {
                    "replicas": shard.replicas,
                    "commit": shard.commit,
                    "rerun": shard.rerun,
                    "labels": self.labels_of(shard.name),
                }
            )
            for shard in self.plan.shards
        }
        async with self.control() as control:
            await control.hset(self.keys.routes, mapping={**routes, ":version": "1"})
            await control.hset(self.keys.shards, mapping=records)

    def labels_of(self, shard: str) -> list[str]:
        added = [label for label in self.workers if label not in self.plan.labels and label.startswith(shard)]
        return [label for at in self.plan.shards if at.name == shard for label in at.labels] + added

    async def _address(self, name: str) -> str:
        if self.plan.fault not in PROXIED:
            return self.broker.url
        if name not in self.proxies:
            self.proxies[name] = Proxy(self.broker.url, self.plan.dice(name))
            await self.proxies[name].start()
        return self.proxies[name].url

    async def add_worker(self, label: str, kill_at: Any = None) -> Actor:
        """A worker under `label`; one that had the label before is expected to be dead."""
        shard = self.plan.shard(label)
        actor = Actor("worker_process", label, self.progress, self._folder)
        if label in self.workers:
            self.retired.append(self.workers[label])
        self.workers[label] = actor
        how = {
            **WORKER_SETTINGS,
            "infra_attempts": self.plan.infra_attempts,
            "slots": self.plan.slots,
            "commit": shard.commit,
            "rerun": shard.rerun,
        }
        where = {"url": await self._address(label), "run": RUN, "shard": shard.name, "label": label}
        await actor.start(
            {**where, "settings": self.plan.settings, "worker": how, "kill_at": kill_at, "drain_s": DRAIN_S}
        )
        return actor

    async def start_trainer(self, kill_at: Any = None) -> Actor:
        if self.trainer is not None:
            self.retired.append(self.trainer)
        self.trainer = Actor("trainer_process", "trainer", self.progress, self._folder)
        batches = [batch.order for batch in self.plan.batches]
        shards = [shard.name for shard in self.plan.shards]
        where = {"url": await self._address("trainer"), "run": RUN, "shards": shards, "journal": str(self.journal_path)}
        how = {"settings": self.plan.settings, "kill_at": kill_at, "delay_s": self.plan.trainer_delay_s}
        await self.trainer.start({**where, **how, "batches": batches})
        return self.trainer

    async def logged(self, count: int) -> bool:
        """Wait until the trainer has begun and logged `count` groups; False when it finished first."""
        now = self.progress
        await now.until(lambda: (bool(now.batches) and len(now.logged) >= count) or now.over)
        return not now.over

    def struck(self, held: set[str] | None = None) -> None:
        """The fault is there: from now until the trainer logs what was `held`, or else anything, is the recovery."""
        began, before = time.monotonic(), set(self.progress.logged)
        waited = {group for group in held or () if group not in before}

        def recovered() -> bool:
            new = set(self.progress.logged)
            return self.progress.finished or (waited <= new if waited else len(new) > len(before))

        async def watch() -> None:
            await self.progress.until(recovered)
            self.recoveries.append(time.monotonic() - began)

        task = asyncio.create_task(watch())
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def finished(self) -> None:
        """Until the trainer is through, or said that it cannot go on."""
        await self.progress.until(lambda: self.progress.over)

    async def watch_aof(self) -> None:
        """Sample the append-only file's size, so that a cut can take back the last second."""
        while True:
            path = self.aof_path()
            if path is not None:
                self.aof_sizes.append((time.monotonic(), path.stat().st_size))
            await asyncio.sleep(0.05)

    def aof_path(self) -> Path | None:
        found = sorted((self._folder / "broker").glob("appendonlydir/*.incr.aof"))
        return found[-1] if found else None

    async def end_workers(self) -> None:
        """Workers leave in good order; one that does not is a violation."""

        async def end(worker: Actor) -> None:
            worker.signal(signal.SIGCONT)
            await self.progress.until(lambda: worker.up or worker.gone)
            if not worker.gone and not await worker.end(signal.SIGTERM, PATIENCE_S):
                self.complaints.append(f"worker {worker.name} did not end within {PATIENCE_S:g} s of SIGTERM")
            # A second SIGTERM may meet a worker that has left and whose interpreter is just ending.
            left = worker.down and worker.code == -signal.SIGTERM
            if not left and worker.code not in (0, -signal.SIGKILL):
                self.complaints.append(f"worker {worker.name} ended with {worker.code}")

        await asyncio.gather(
            *(end(worker) for worker in [*self.workers.values(), *self.retired] if worker.name != "trainer")
        )

    async def stop(self) -> None:
        """End whatever is left, whatever happened; says who had to be killed."""
        for actor in self.actors():
            if not actor.gone:
                actor.signal(signal.SIGCONT)
                actor.signal(signal.SIGKILL)
                await actor.wait(PATIENCE_S)
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*(proxy.stop() for proxy in self.proxies.values()))
        await asyncio.to_thread(self.broker.stop)

    def last_words(self) -> str:
        return "\n".join(actor.last_words() for actor in self.actors())

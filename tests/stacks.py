"""A whole way of a batch for one test: a run on a broker, workers in this process or in their own, clients, and the
check at the end.

A `Stack` promises that what the test started has ended, and raises when a key of its run, a thread or a child is left
that should not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import psutil
import redis
import redis.asyncio
from rolloutbus.broker import codec
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers.worker import ShardWorker
from rolloutbus.shard_workers.worker_settings import WorkerSettings
from rolloutbus.trainer import CompletedGroup, GroupFailure, RolloutClient

Row = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
GONE_WITHIN_S = 2.0
# Small leases, so that what takes a lease takes a second; the rest keeps its proportions.
QUICK: dict[str, Any] = {
    "lease_s": 1.0,
    "renew_every_s": 0.2,
    "sweep_every_s": 0.2,
    "command_timeout_s": 5.0,
    "reconnect_timeout_s": 30.0,
}


def within(seconds: float) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """A test that takes longer fails, and its cleaning up still runs."""

    def decorate(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(test)
        async def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
            async with asyncio.timeout(seconds):
                return await test(*args, **kwargs)

        return bounded

    return decorate


def rows_of(groups: int, size: int = 2, route: str | Sequence[str] = "a", **more: Any) -> list[Row]:
    """Rows of `groups` prompt groups; group g goes to `route`, or to the g-th of several in turn."""
    routes = [route] if isinstance(route, str) else route
    return [
        {
            "responses_create_params": {"input": f"prompt {group}"},
            "agent_ref": {"name": routes[group % len(routes)]},
            **more,
        }
        for group in range(groups)
        for _ in range(size)
    ]


async def echo(row: Row) -> Row:
    """The simplest rollout: its result says which row it was."""
    return {"row": row["_rowidx"], "group_id": row["_group_id"]}


class Sealed:
    """Travels, and what becomes of it afterwards is a test's to say."""


def seal(unpack: Callable[[Any], Sealed]) -> None:
    """Let `Sealed` be unpacked by `unpack`."""
    codec.register(Sealed, lambda _: "sealed", unpack)


def refuse(value: Any) -> Sealed:
    """The way back of a result that cannot be read."""
    raise ValueError(f"no way back from {value!r}")


async def sealed_rollout(row: Row) -> Row:
    """A rollout whose result is sealed where the row asks for it."""
    return {"row": row["_rowidx"], "value": Sealed() if row.get("sealed") else None}


class EachRow:
    """An environment that runs `rollout(row)` for every row side by side, and counts what it ran."""

    def __init__(self, rollout: Callable[[Row], Awaitable[Any]] = echo) -> None:
        self.ran: list[int] = []
        self.running = 0
        self.idle = asyncio.Event()
        self._rollout = rollout

    async def start(self, config: Mapping[str, Any]) -> None:
        """Nothing to start."""

    def list_entries(self) -> dict[str, list[str]]:
        return {"a": ["responses_api_agents"]}

    async def run_rollouts(self, rows: Sequence[Row]) -> AsyncGenerator[Any]:
        tasks = [asyncio.create_task(self._run(row)) for row in rows]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, row: Row) -> tuple[Row, Any]:
        self.ran.append(row["_rowidx"])
        self.running += 1
        self.idle.clear()
        try:
            return row, await self._rollout(row)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def health(self) -> None:
        """Always well."""

    async def stop(self) -> None:
        """Nothing to stop."""


class WholeGroup(EachRow):
    """An environment whose stream of outcomes the test writes itself: `behaviour(rows)` is an async generator."""

    def __init__(self, behaviour: Callable[[Sequence[Row]], Any]) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self._behaviour = behaviour

    def run_rollouts(self, rows: Sequence[Row]) -> Any:
        self.calls.append([row["_rowidx"] for row in rows])
        return self._behaviour(rows)


class Gates:
    """Rollouts that wait until the test opens their group."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}
        self.ended = 0

    def __getitem__(self, group: int) -> asyncio.Event:
        return self._events.setdefault(group, asyncio.Event())

    def open(self, *groups: int) -> None:
        for group in groups:
            self[group].set()

    async def rollout(self, row: Row) -> Row:
        try:
            await self[row["_rowidx"] // 2].wait()
        finally:
            self.ended += 1
        return {"row": row["_rowidx"], "group_id": row["_group_id"]}


class Pace:
    """Rollouts of which the first ones run freely and the rest when told."""

    def __init__(self, free: int) -> None:
        self._free = free
        self.go = asyncio.Event()

    async def rollout(self, row: Row) -> Row:
        if row["_rowidx"] >= self._free:
            await self.go.wait()
        return {"row": row["_rowidx"]}


class WorkerProcess:
    """A worker in a process of its own (tests/worker_program.py), told what to do and telling what happens over its
    pipes.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.seen: list[dict[str, Any]] = []

    async def event(self, kind: str, **words: Any) -> dict[str, Any]:
        """The next event of this kind; what comes before it is kept in `seen`."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            event = json.loads(line)
            self.seen.append(event)
            if event["event"] == kind and words.items() <= event.items():
                return event
        raise AssertionError(f"the worker ended before {kind} {words}; it said {self.seen}")

    def tell(self, order: str, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps([order, *words]) + "\n").encode())

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.go_on()
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.stdout is not None
            while await self.process.stdout.readline():
                pass
        await self.process.wait()


class Stack:
    """One run on one broker. Workers and clients made here are ended by `end`."""

    def __init__(self, broker: EmbeddedBroker, **settings: Any) -> None:
        self.broker = broker
        self.run = f"t{secrets.token_hex(4)}"
        self.keys = Keys(self.run)
        self.options = {**QUICK, **settings}
        # Untyped: redis-py's commands promise every reply that any protocol version gives.
        self.redis: Any = cast("Any", redis.Redis).from_url(broker.url)
        self.watch: Any = cast("Any", redis.asyncio.Redis).from_url(broker.url)
        self.workers: dict[str, ShardWorker] = {}
        self.processes: list[WorkerProcess] = []
        self._ends = contextlib.AsyncExitStack()
        self._hosted: tuple[dict[str, str], dict[str, dict[str, Any]]] = ({}, {})
        self._tasks: list[asyncio.Task[None]] = []
        self.strays_expected = False

    @property
    def settings(self) -> BrokerSettings:
        return BrokerSettings(url=self.broker.url, **self.options)

    def host(
        self, shards: Mapping[str, Mapping[str, Any]] | None = None, routes: Mapping[str, str] | None = None
    ) -> None:
        """Publish routes and shard records as a fleet does; without arguments, what was hosted before or one shard for
        route `a`.
        """
        if shards is not None or not self._hosted[0]:
            given = {name: dict(record) for name, record in (shards or {"s": {}}).items()}
            self._hosted = (dict(routes or {"a": next(iter(given))}), given)
        routes_now, shards_now = self._hosted
        self.redis.hset(self.keys.routes, mapping={**routes_now, ":version": "1"})
        self.redis.hset(self.keys.shards, mapping={name: json.dumps(record) for name, record in shards_now.items()})

    async def worker(
        self, environment: Any = None, shard: str = "s", label: str | None = None, **settings: Any
    ) -> ShardWorker:
        """A worker in this process, running when this returns."""
        label = label or shard
        quick: dict[str, Any] = {"retry_backoff_s": 0.01, "cancel_grace_s": 0.3, **settings}
        worker = ShardWorker(self.settings, self.run, shard, label, environment or EachRow(), WorkerSettings(**quick))
        self.workers[label] = worker
        self._tasks.append(asyncio.create_task(worker.run(), name=f"worker {label}"))
        await self.reading(shard, worker.identity.consumer)
        return worker

    async def reading(self, shard: str, consumer: str) -> None:
        """Return when this consumer is known to the shard's stream, which is when it first reads."""
        while True:
            with contextlib.suppress(redis.ResponseError):
                known = await self.watch.xinfo_consumers(self.keys.groups(shard), "workers")
                if consumer.encode() in [one["name"] for one in known]:
                    return
            await asyncio.sleep(0.01)

    async def process(
        self, shard: str = "s", label: str | None = None, *, hold: bool = False, **settings: Any
    ) -> WorkerProcess:
        """A worker in its own process; with `hold` its rows wait until told to `go`."""
        order = {
            "broker": self.settings.model_dump(), "run": self.run, "shard": shard, "label": label or shard,
            "hold": hold,
            "worker": {"retry_backoff_s": 0.01, **settings},
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.worker_program", json.dumps(order),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        worker = WorkerProcess(process)
        self.processes.append(worker)
        started = await worker.event("started")
        await self.reading(shard, started["consumer"])
        return worker

    def client(self, **options: Any) -> RolloutClient:
        given: dict[str, Any] = {"fleet_wait_s": 5.0, **options}
        return RolloutClient.connect(self.broker.url, run=self.run, settings=self.options, **given)

    async def connected(self, **options: Any) -> RolloutClient:
        """A client that the stack closes."""
        return await self._ends.enter_async_context(self.client(**options))

    async def happens(self, kind: str, count: int = 1, **words: Any) -> None:
        """Return when the run's events stream has `count` events of this kind with these words."""
        wanted = {name: str(value) for name, value in words.items()}
        found, cursor = 0, "0"
        while found < count:
            reply = await self.watch.xread({self.keys.events: cursor}, block=1000)
            for _, entries in reply:
                for entry, fields in entries:
                    cursor = entry
                    event = {name.decode(): value.decode() for name, value in fields.items()}
                    found += event["kind"] == kind and wanted.items() <= event.items()

    def keys_of(self, batch: str) -> list[bytes]:
        return [key for key in self.redis.scan_iter(f"{self.keys.prefix}*") if batch.encode() in key]

    async def end(self) -> None:
        """End clients and workers; raise for what is left behind."""
        for process in self.processes:
            await process.stop()
        await self._ends.aclose()
        for worker in self.workers.values():
            worker.stop()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        left = [] if self.strays_expected else self.left_behind()
        for name in [*self.redis.scan_iter(f"{self.keys.prefix}*")]:
            self.redis.delete(name)
        self.redis.close()
        await self.watch.aclose()
        errors = [error for error in ended if isinstance(error, Exception)]
        assert errors == []
        assert left == []
        threads = [
            thread.name for thread in threading.enumerate() if thread.name.startswith(("rolloutbus-", "leases-"))
        ]
        assert threads == []

    def left_behind(self) -> list[str]:
        """Keys that should be gone: all but what a fleet and an operator keep, and empty groups streams that expire by
        themselves.
        """
        kept = {self.keys.routes, self.keys.shards, self.keys.events, self.keys.dead}
        left: list[str] = []
        for raw in self.redis.scan_iter(f"{self.keys.prefix}*"):
            key = raw.decode()
            if key in kept:
                continue
            if key.startswith(self.keys.groups("")) and self.redis.xlen(key) == 0 and self.redis.pttl(key) > 0:
                continue
            left.append(f"{key} {self.redis.type(key)}")
        return left


def processes_but(broker: EmbeddedBroker) -> set[int]:
    """Descendants of this process, the broker's own two left out: a restarted broker is another process."""
    children: set[int] = set()
    for child in psutil.Process().children(recursive=True):
        # It may end while it is looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                children.add(child.pid)
    return children - {broker.pid or 0, broker.supervisor_pid or 0}


@contextlib.asynccontextmanager
async def stack_on(broker: EmbeddedBroker, **settings: Any) -> AsyncGenerator[Stack]:
    """A stack that ends with the block; a failing test is not hidden behind what it left."""
    stack = Stack(broker, **settings)
    before = processes_but(broker)
    try:
        yield stack
    except BaseException:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(20):
                await stack.end()
        raise
    async with asyncio.timeout(20):
        await stack.end()
    assert processes_but(broker) <= before


async def until(condition: Callable[[], Any]) -> None:
    """Return when `condition()` holds, for what gives no event; bounded by the test's own time limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def gone(stack: Stack, batch: str, environment: EachRow) -> None:
    """Within two seconds no task of the batch runs and no key of it is there."""
    async with asyncio.timeout(GONE_WITHIN_S):
        await until(lambda: not environment.running and not stack.keys_of(batch))


async def results_are_gone(stack: Stack) -> None:
    """Entries of a batch that was left used to stay on the client's result stream for as long as the client lived."""
    async with asyncio.timeout(5):
        await until(lambda: stack.redis.xlen(stack.keys.results("trainer", "s")) == 0)


async def groups_of(batch: AsyncIterator[Any]) -> list[CompletedGroup | GroupFailure]:
    return [group async for group in batch]


async def outcome_of(stack: Stack, groups: int = 1, **options: Any) -> tuple[list[Any], Any]:
    """What became of the groups of a batch, and the batch."""
    client = await stack.connected()
    async with client.run_groups(rows_of(groups), 2, on_failure="yield", **options) as batch:
        return await groups_of(batch), batch


def check_groups(groups: Sequence[CompletedGroup | GroupFailure], count: int, size: int = 2) -> None:
    """Every group came once, whole and in input order, with results of its own rows."""
    assert sorted(group.group_index for group in groups) == list(range(count))
    for group in groups:
        assert isinstance(group, CompletedGroup), group
        first = group.group_index * size
        assert [row["_rowidx"] for row in group.rows] == list(range(first, first + size))
        assert [result["row"] for result in group.results] == list(range(first, first + size))

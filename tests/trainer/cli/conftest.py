"""A broker of its own for each test, instances of a shard in threads, a batch that stands still where it is told to,
and the CLI.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
import redis
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers import ShardWorker, WorkerSettings
from rolloutbus.trainer import RolloutClient
from rolloutbus.trainer.batch import GroupBatch
from rolloutbus.trainer.cli.app import app
from typer.testing import CliRunner

RUN = "exp1"
SHARD = "math"
ROUTE = "arithmetic"
PATIENCE_S = 20.0

Row = dict[str, Any]


def comes_true(condition: Callable[[], Any]) -> None:
    """Another process gives no event when the broker has its word, so this looks until it has."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def redis_at(url: str, *, decode: bool = True) -> Any:
    """A plain client; redis-py's own types are of no use under a strict checker."""
    return cast(Any, redis.Redis).from_url(url, decode_responses=decode)


def rows_of(*deeds: str, generations: int = 2) -> list[Row]:
    """A group per deed: `ok`, `fail`, or `wait` until the gate opens."""
    row = {"responses_create_params": {"input": "1+1?"}, "agent_ref": {"name": ROUTE}}
    return [{**row, "do": deed} for deed in deeds for _ in range(generations)]


class GatedEnvironment:
    """Rows say what becomes of them; `mended` makes the failing ones complete."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.mended = False

    async def start(self, config: Mapping[str, Any]) -> None: ...

    def list_entries(self) -> dict[str, list[str]]:
        return {ROUTE: ["responses_api_agents"]}

    async def run_rollouts(self, rows: Sequence[Row]) -> AsyncIterator[tuple[Row, Row]]:
        for row in rows:
            if row["do"] == "wait":
                await self.gate.wait()
            if row["do"] == "fail" and not self.mended:
                raise ValueError("no number in [the] answer")
            yield row, {"reward": 1.0, "seen": row["_rowidx"]}

    async def health(self) -> None: ...

    async def stop(self) -> None: ...


class InstanceThread:
    """One instance of the shard, in a thread with an event loop of its own."""

    def __init__(self, url: str, label: str, slots: int) -> None:
        self.environment: GatedEnvironment
        self._settings = BrokerSettings(url=url)
        self._label = label
        self._slots = slots
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name=label)
        self._thread.start()
        self._up.wait(PATIENCE_S)

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.environment = GatedEnvironment()
        settings = WorkerSettings(slots=self._slots, data_attempts=1, retry_backoff_s=0)
        self._worker = ShardWorker(self._settings, RUN, SHARD, self._label, self.environment, settings)
        self._up.set()
        await self._worker.run()

    def open_gate(self) -> None:
        self._loop.call_soon_threadsafe(self.environment.gate.set)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._worker.stop)
        self._thread.join(PATIENCE_S)


class Stage:
    """A run on a broker, with what a test puts on it."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.url = broker.url
        self.keys = Keys(RUN)
        self.redis = redis_at(self.url)
        self.instances: list[InstanceThread] = []
        self.client: RolloutClient | None = None
        self.redis.hset(self.keys.routes, mapping={ROUTE: SHARD, ":version": "1"})
        self.redis.hset(self.keys.shards, SHARD, json.dumps({"replicas": 1, "slots": 2}))
        for key in (self.keys.routes, self.keys.shards):
            self.redis.expire(key, 3600)

    def instance(self, slots: int = 2, label: str = SHARD) -> InstanceThread:
        self.instances.append(InstanceThread(self.url, label, slots))
        comes_true(lambda: self.redis.exists(self.keys.instance(label)))
        return self.instances[-1]

    def batch(self, rows: list[Row], generations: int = 2) -> GroupBatch:
        """A batch under way; it goes with the stage."""
        if self.client is None:
            self.client = RolloutClient.connect(self.url, run=RUN).connect_now()
        return self.client.run_groups(rows, generations, on_failure="yield")

    def status(self, batch: GroupBatch, group: int) -> str:
        record = self.redis.hget(self.keys.batch(batch.id), f"g:{group}")
        return str(record).partition(" ")[0]

    def sealed(self, batch: GroupBatch) -> None:
        """Return once all groups of the batch are published."""
        comes_true(lambda: self.redis.hget(self.keys.batch(batch.id), "state") == "sealed")

    def strike(self) -> None:
        if self.client is not None:
            self.client.close_now()
        for instance in self.instances:
            instance.stop()
        self.redis.close()


def take(batch: GroupBatch, groups: int) -> list[Any]:
    """The next outcomes of the batch."""

    async def collect() -> list[Any]:
        return [await anext(batch) for _ in range(groups)]

    return asyncio.run(collect())


class Answer:
    """What a command said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def said(self) -> str:
        """Standard error as one line, however it was wrapped."""
        return " ".join(self.err.split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(*words: str, code: int = 0, stdin: str | None = None) -> Answer:
    """Run a command in this process; it must end with `code`."""
    result = CliRunner().invoke(app, list(words), input=stdin)
    answer = Answer(result.exit_code, result.stdout, result.stderr)
    assert answer.code == code, f"{answer.code}\n{answer.out}\n{answer.err}\n{result.exception!r}"
    return answer


@pytest.fixture(autouse=True)
def _no_broker_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tcp=True) as server:
        yield server


@pytest.fixture
def stage(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """The stage; commands find its broker in REDIS_URL."""
    monkeypatch.setenv("REDIS_URL", broker.url)
    stage = Stage(broker)
    yield stage
    stage.strike()

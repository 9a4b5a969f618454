"""A handle that serves a run is looked after as a fleet's instance is: without Ray."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import BrokerError, BrokerUnavailableError, FleetError, NoInstanceError
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers import WorkerSettings, as_shard_fleet
from rolloutbus.shard_workers.fleet import HandleFleet, handle_engine
from rolloutbus.shard_workers.fleet.handle_engine import HandleEngine
from rolloutbus.shard_workers.fleet_config import FleetSettings
from rolloutbus.shard_workers.worker import ShardWorker
from rolloutbus.trainer import RolloutClient

from tests.chaos.proxy import Proxy
from tests.shard_workers.fleet.conftest import keys_of
from tests.shard_workers.fleet.fleets import BROKER, Redis, rows_for


class Handle:
    """Streams rollouts, and counts how often it is shut down."""

    def __init__(self) -> None:
        self.ends = 0

    async def run_rollouts(self, rows: Sequence[dict[str, Any]]) -> AsyncIterator[tuple[dict[str, Any], Any]]:
        for row in rows:
            yield row, {"row": row["_rowidx"]}

    def shutdown(self) -> None:
        self.ends += 1


@pytest.fixture
def run() -> str:
    return f"handle-{secrets.token_hex(4)}"


@pytest.fixture
def settings(valkey: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> BrokerSettings:
    """One restart an hour, and it comes soon."""
    monkeypatch.setattr(handle_engine, "FLEET", FleetSettings(max_restarts=1, restart_backoff_s=0.01))
    return quick_settings(valkey.url, renew_every_s=0.05)


def quick_settings(url: str, **changed: Any) -> BrokerSettings:
    return BrokerSettings.model_validate({"url": url, **BROKER, **changed})


def serving(settings: BrokerSettings, run: str) -> HandleFleet:
    fleet = as_shard_fleet(Handle(), settings, run)
    assert isinstance(fleet, HandleFleet)
    return fleet


def rows_through(settings: BrokerSettings, run: str) -> list[int]:
    impatient = {**BROKER, "no_instance_timeout_s": 20.0}
    results = RolloutClient.run_sync(settings.url, rows_for(["any"], 3), 4, run=run, settings=impatient)
    return [result["row"] for result in results]


def end_first_runs(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> None:
    """The first worker loops end with these."""
    work = ShardWorker.run

    async def run_or_end(worker: ShardWorker) -> None:
        if errors:
            raise errors.pop(0)
        await work(worker)

    monkeypatch.setattr(ShardWorker, "run", run_or_end)


@pytest.mark.parametrize(
    "errors",
    [[BrokerError("WRONGTYPE")], [RuntimeError("a bug")], [BrokerUnavailableError("away")] * 3],
    ids=["broker", "bug", "away"],
)
def test_a_worker_loop_that_ends_by_itself_begins_again(
    settings: BrokerSettings, run: str, monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> None:
    """It was only logged: the lease went on, and trainers waited for an instance."""
    end_first_runs(monkeypatch, errors := [*errors])
    with serving(settings, run) as fleet:
        assert rows_through(settings, run) == list(range(12))
        assert fleet.labels == {"nemo_gym": ["nemo_gym"]}
    assert errors == []


def test_one_whose_label_was_taken_takes_it_back(settings: BrokerSettings, run: str, broker: Redis) -> None:
    record = Keys(run).instance("nemo_gym")
    with serving(settings, run):
        deadline = time.monotonic() + 20
        while not broker.exists(record):
            assert time.monotonic() < deadline
        broker.hset(record, "incarnation", "stranger")
        while broker.hget(record, "incarnation") in ("stranger", None):
            assert time.monotonic() < deadline
        assert rows_through(settings, run) == list(range(12))


def test_one_that_ends_again_and_again_is_published_as_lost(
    settings: BrokerSettings, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_first_runs(monkeypatch, [RuntimeError("a bug")] * 2)
    with serving(settings, run) as fleet:
        with pytest.raises(NoInstanceError, match="RuntimeError: a bug; 1 restarts within an hour did not help"):
            rows_through(settings, run)
        assert fleet.labels == {"nemo_gym": []}


def test_what_is_refused_leaves_the_run_to_a_second_try(settings: BrokerSettings, run: str, broker: Redis) -> None:
    """The lease that it had claimed stayed, and refused it."""
    keys, fleet = Keys(run), HandleFleet(Handle(), WorkerSettings(), [])
    broker.hset(keys.routes, mapping={"math": "math", ":version": "of a fleet that died"})
    broker.hset(keys.batch("b7"), "state", "open")
    for _ in range(2):
        with pytest.raises(FleetError, match="open batches, b7 among them"):
            fleet.serve(settings, run)
    assert keys_of(broker, run) == {"routes", "batch:b7"}
    broker.delete(keys.batch("b7"))
    with fleet:
        fleet.serve(settings, run)
        assert rows_through(settings, run) == list(range(12))


async def test_its_end_waits_for_no_broker_that_is_away(
    valkey: EmbeddedBroker, run: str, broker: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for as long as for a broker that comes back, five minutes."""
    proxy = Proxy(valkey.url, random.Random(7))
    await proxy.start()
    settings = quick_settings(proxy.url, reconnect_timeout_s=300.0)
    handle = Handle()
    fleet = HandleFleet(handle, WorkerSettings(drain_timeout_s=0.1), [])
    await asyncio.to_thread(fleet.serve, settings, run)
    proxy.misbehave("reset")
    async with asyncio.timeout(60):
        while "fleet: waiting for the broker since" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.to_thread(fleet.shutdown)
    assert handle.ends == 1
    assert "no answer from the broker" in caplog.text
    await proxy.stop()
    broker.delete(*broker.scan_iter(match=f"{Keys(run).prefix}*"))


def test_an_end_that_fails_still_ends_thread_and_handle(
    settings: BrokerSettings, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle()
    fleet = as_shard_fleet(handle, settings, run)
    leave = HandleEngine.leave

    async def leave_badly(engine: HandleEngine) -> None:
        await leave(engine)
        raise RuntimeError("a bug")

    monkeypatch.setattr(HandleEngine, "leave", leave_badly)
    with pytest.raises(RuntimeError, match="a bug"):
        fleet.shutdown()
    thread: Any = fleet._thread  # pyright: ignore[reportPrivateUsage]
    assert (thread.alive, handle.ends) == (False, 1)

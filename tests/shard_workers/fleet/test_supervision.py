"""What dies or falls ill is noticed, named and replaced in its place; a batch in the middle of it loses no row."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import NoInstanceError
from rolloutbus.broker.shard_records import parse_record
from rolloutbus.shard_workers import ShardFleet

from tests.chaos.proxy import Proxy
from tests.shard_workers.fleet.fleets import Redis, StartFleet, connected, fleet_config, open_batch, shard
from tests.shard_workers.fleet.stacks import events

pytestmark = pytest.mark.usefixtures("local_ray")


@asynccontextmanager
async def running_batch(fleet: ShardFleet, groups: int) -> AsyncGenerator[Any]:
    """A batch of which the first group is there, so that it is certainly under way."""
    async with open_batch(fleet, groups) as batch:
        await anext(aiter(batch))
        yield batch


def pid_of(fleet: ShardFleet, label: str) -> int:
    return next(status.pid for status in fleet.status() if status.label == label)


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def running(fleet: ShardFleet, label: str, restarts: int) -> bool:
    return any(s.label == label and s.restarts == restarts and s.state == "running" for s in fleet.status())


async def test_a_killed_process_costs_no_row_and_its_groups_do_not_wait_for_the_lease(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    # The lease is long, so only the fleet's word can free the groups before the time is up.
    config = fleet_config(
        valkey.url, tmp_path, [shard("math", replicas=2, row_s=0.1)], broker={"lease_s": 20.0}, workers={"slots": 4}
    )
    fleet = start_fleet(config)
    # Absence counts only after one lease of watching; the other instance has to have watched that long.
    await asyncio.sleep(max(0.0, 20.0 - valkey_uptime(valkey)))
    async with running_batch(fleet, 24) as batch:
        victim = pid_of(fleet, "math/0")
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        assert len([group async for group in batch]) == 23
        assert time.monotonic() - killed < 15.0
        assert batch.counts.failed == 0
    assert "instance math/0): its process died" in caplog.text
    await asyncio.to_thread(wait_for, lambda: running(fleet, "math/0", 1))
    assert pid_of(fleet, "math/0") != victim
    assert fleet.labels == {"math": ["math/0", "math/1"]}


def valkey_uptime(valkey: EmbeddedBroker) -> float:
    with connected(valkey.url) as client:
        return float(client.info("server")["uptime_in_seconds"])


async def test_a_restarted_instance_takes_nothing_before_its_stack_is_up(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math", row_s=0.05, start_s=1.0)]))
    async with running_batch(fleet, 40) as batch:
        os.kill(pid_of(fleet, "math"), signal.SIGKILL)
        assert len([group async for group in batch]) == 39
    (_, _, _), (up, pid, _) = events(tmp_path, "started")
    ran = [when for when, process, _ in events(tmp_path, "ran") if process == pid]
    assert ran
    assert min(ran) > up
    taken = connected(valkey.url)
    with taken:
        stamps = [
            int(entry.split("-")[0]) / 1000
            for entry, fields in taken.xrange(f"rolloutbus:{{{fleet.run}}}:events")
            if fields["kind"] == "taken"
        ]
    starting = events(tmp_path, "starting")[1][0]
    assert not [stamp for stamp in stamps if starting <= stamp < up]


def test_an_environment_that_stays_sick_is_replaced_and_named(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math")], fleet={"health_failures": 2}))
    before = pid_of(fleet, "math")
    (tmp_path / "sick").touch()
    wait_for(lambda: "ConnectionError: the verifier does not answer (failure 2 of 2 in a row)" in caplog.text)
    (tmp_path / "sick").unlink()
    wait_for(lambda: running(fleet, "math", 1))
    assert pid_of(fleet, "math") != before
    assert [pid for _, pid, _ in events(tmp_path, "stopping")] == [before], "it was stopped, not just dropped"


async def test_when_the_budget_is_spent_the_batch_ends_with_the_reason(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, broker: Redis
) -> None:
    # Two at a time, so that the batch is not through before the second kill.
    config = fleet_config(
        valkey.url, tmp_path, [shard("math", row_s=0.2)], fleet={"max_restarts": 1}, workers={"slots": 2}
    )
    fleet = start_fleet(config)
    async with running_batch(fleet, 40) as batch:
        os.kill(pid_of(fleet, "math"), signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: running(fleet, "math", 1))
        os.kill(pid_of(fleet, "math"), signal.SIGKILL)
        with pytest.raises(
            NoInstanceError, match=r"shard math has no instance left .*its process died.*max_restarts 1"
        ):
            async for _ in batch:
                pass
    record = parse_record(broker.hget(f"rolloutbus:{{{fleet.run}}}:shards", "math").encode())
    assert record is not None
    assert (record.replicas, record.labels) == (0, [])

    fleet.scale("math", 1)

    async with running_batch(fleet, 4) as batch:
        assert len([group async for group in batch]) == 3
    assert fleet.labels == {"math": ["math/0"]}


def test_an_instance_whose_label_is_taken_stops_itself_and_the_fleet_takes_it_back(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, broker: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math")]))
    record = f"rolloutbus:{{{fleet.run}}}:instance:math"
    wait_for(lambda: broker.exists(record) == 1)
    broker.hset(record, "incarnation", "stranger")
    wait_for(lambda: running(fleet, "math", 1))
    assert "instance math) stopped because another process took its label" in caplog.text
    wait_for(lambda: broker.hget(record, "pid") == str(pid_of(fleet, "math")))
    kinds = {fields["kind"] for _, fields in broker.xrange(f"rolloutbus:{{{fleet.run}}}:events")}
    assert kinds == {"instance-died", "instance-restarted"}


def test_a_restart_that_fails_counts_too(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    config = fleet_config(valkey.url, tmp_path, [shard("math")], fleet={"max_restarts": 2})
    fleet = start_fleet(config)
    # The folder that the stack writes to is gone, so no successor can start.
    folder = tmp_path.rename(tmp_path.with_name(tmp_path.name + "-moved"))
    try:
        os.kill(pid_of(fleet, "math"), signal.SIGKILL)
        wait_for(lambda: "math) is given up" in caplog.text)
    finally:
        folder.rename(tmp_path)
    assert "FileNotFoundError" in caplog.text
    assert [status.state for status in fleet.status()] == ["lost"]


async def test_an_outage_of_the_broker_longer_than_all_patience_costs_no_instance(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    """Each start without a broker was a death, and the instance was given up about a minute into the outage."""
    proxy = Proxy(valkey.url, random.Random(7))
    await proxy.start()
    settings = {"max_restarts": 1, "restart_backoff_max_s": 0.5}
    config = fleet_config(proxy.url, tmp_path, [shard("math")], fleet=settings, broker={"reconnect_timeout_s": 1.0})
    fleet = await asyncio.to_thread(start_fleet, config)
    proxy.misbehave("reset")
    await asyncio.to_thread(wait_for, lambda: fleet.status()[0].restarts >= 3, 60.0)
    assert fleet.labels == {"math": ["math"]}
    proxy.heal()
    await asyncio.to_thread(wait_for, lambda: fleet.status()[0].state == "running", 60.0)
    async with running_batch(fleet, 4) as batch:
        assert len([group async for group in batch]) == 3
    await asyncio.to_thread(fleet.shutdown)
    await proxy.stop()

"""Changing a running fleet: scale and drain in the middle of a batch, over the broker too, and an end that names who
would not go.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ConfigError, FleetError
from rolloutbus.broker.fleet_requests import Request, request_change
from rolloutbus.broker.fleet_transitions import FleetTransitions
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers import ShardFleet, ShardSetupError
from rolloutbus.shard_workers.fleet.engine import FleetEngine
from rolloutbus.shard_workers.fleet.instances import Instance, InstanceTroubleError, Launcher
from rolloutbus.trainer import RolloutClient

from tests.shard_workers.fleet.fleets import (
    BROKER,
    Redis,
    StartFleet,
    connected,
    fleet_config,
    open_batch,
    ray,
    rows_for,
    shard,
)
from tests.shard_workers.fleet.stacks import events

pytestmark = pytest.mark.usefixtures("local_ray")


def runs(folder: Path) -> Counter[str]:
    """How often each group was run to its end, whatever the attempt."""
    return Counter(detail.rsplit(":", 1)[0] for _, _, detail in events(folder, "ran"))


async def test_scaling_up_and_down_in_a_batch_costs_no_row_and_repeats_none(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math", row_s=0.05)], workers={"slots": 2}))
    first = fleet.status()[0].pid
    async with open_batch(fleet, 150) as batch:
        groups = aiter(batch)
        got = [await anext(groups)]

        await asyncio.to_thread(fleet.scale, "math", 3)
        assert fleet.labels == {"math": ["math", "math/1", "math/2"]}
        assert fleet.status()[0].pid == first, "the label that was there goes on in the same process"
        assert [s.ports for s in fleet.status()] == [(20000, 20050), (20050, 20100), (20100, 20150)]
        seen: set[str] = set()
        while len(seen) < 3:
            got.append(await anext(groups))
            seen |= {label for label, _ in got[-1].origins}

        await asyncio.to_thread(fleet.scale, "math", 1)
        assert fleet.labels == {"math": ["math"]}
        got += [group async for group in groups]
    assert sorted(group.group_index for group in got) == list(range(150))
    assert batch.counts.failed == 0
    assert set(runs(tmp_path).values()) == {1}, "what was finished was not run again"
    assert len(runs(tmp_path)) == 150


async def test_others_ask_for_scale_and_drain_over_the_broker(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, broker: Redis
) -> None:
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math", row_s=0.05)], workers={"slots": 2}))
    async with open_batch(fleet, 60) as batch:
        await asyncio.to_thread(request_change, fleet.broker, fleet.run, Request.to_scale("math", 2), timeout_s=60)
        assert fleet.labels == {"math": ["math", "math/1"]}
        await asyncio.to_thread(request_change, fleet.broker, fleet.run, Request.to_drain("math"), timeout_s=60)
        assert fleet.labels == {"math": ["math/1"]}
        assert len([group async for group in batch]) == 60
    assert set(runs(tmp_path).values()) == {1}
    assert broker.exists(f"rolloutbus:{{{fleet.run}}}:fleet:requests") == 0, "answers that were read are gone"

    with pytest.raises(FleetError, match=r"drain math/1: math/1 is the last instance of shard math; scale it up first"):
        await asyncio.to_thread(request_change, fleet.broker, fleet.run, Request.to_drain("math/1"))
    with pytest.raises(FleetError, match=r"drain nobody: there is no instance 'nobody'; there are math/1"):
        await asyncio.to_thread(request_change, fleet.broker, fleet.run, Request.to_drain("nobody"))
    with pytest.raises(FleetError, match=r"scale chess: there is no shard 'chess'; there are math"):
        await asyncio.to_thread(request_change, fleet.broker, fleet.run, Request.to_scale("chess", 2))


def test_whoever_asks_hears_of_any_failure(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ray raised was only logged, and the command waited for half an hour."""
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math")]))

    async def fail(*_: object) -> None:
        raise TimeoutError("no answer from the GCS")

    monkeypatch.setattr(FleetEngine, "scale", fail)
    with pytest.raises(FleetError, match="scale math: TimeoutError: no answer from the GCS"):
        request_change(fleet.broker, fleet.run, Request.to_scale("math", 2), timeout_s=10)


def test_groups_that_outlast_a_drain_are_handed_back_without_a_failure(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    config = fleet_config(
        valkey.url, tmp_path, [shard("math", replicas=2, row_s=0.5)], workers={"slots": 2, "drain_timeout_s": 0.1}
    )
    fleet = start_fleet(config)
    results: list[object] = []
    rows = rows_for(["math"], 6)
    batch = threading.Thread(
        target=lambda: results.extend(RolloutClient.run_sync(valkey.url, rows, 4, run=fleet.run, settings=BROKER))
    )
    batch.start()
    with connected(valkey.url) as client:
        stream = f"rolloutbus:{{{fleet.run}}}:events"
        while not any(
            fields["kind"] == "taken" and fields["instance"] == "math/1" for _, fields in client.xrange(stream)
        ):
            assert batch.is_alive()
        fleet.drain("math/1")
        batch.join()
        kinds = Counter(fields["kind"] for _, fields in client.xrange(stream))
    assert len(results) == 24
    assert kinds["released"] > 0
    assert not kinds["lost"] + kinds["retry"] + kinds["failed"]


def test_scaling_is_refused_where_ports_or_bundles_are_missing_and_changes_nothing(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    narrow = shard("narrow", port_range_low=23000, port_range_high=23060)
    big = shard("big", actor_cpus=1.5)
    config = fleet_config(valkey.url, tmp_path, [narrow, big], fleet={"placement_timeout_s": 1})
    fleet = start_fleet(config)
    before = fleet.status()
    with pytest.raises(
        ConfigError, match=r"shard 'narrow' has ports for 1 replicas \(23000 to 23059.*widen its port range"
    ):
        fleet.scale("narrow", 2)
    with pytest.raises(FleetError, match=r"1 bundles \(1 of 1.5 CPU each\) could not be placed"):
        fleet.scale("big", 2)
    with pytest.raises(ConfigError, match="shard 'big' cannot have 0 replicas"):
        fleet.scale("big", 0)
    assert fleet.status() == before


def test_an_instance_that_dies_just_before_it_begins_takes_those_added_with_it_back(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by chaos on a fleet: `scale` said that nothing was left running, and the new ones stayed, unwatched."""
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math", replicas=2)]))
    before = fleet.status()
    begin = Launcher.begin

    async def begin_but_one(launcher: Launcher, instance: Instance) -> None:
        if instance.label == "math/3":
            raise InstanceTroubleError(f"{instance.label}: its process died during begin", dead=True)
        await begin(launcher, instance)

    monkeypatch.setattr(Launcher, "begin", begin_but_one)
    with pytest.raises(ShardSetupError, match="math/3: its process died during begin; nothing is left running"):
        fleet.scale("math", 4)
    assert fleet.status() == before
    with connected(valkey.url) as client:
        assert not client.exists(Keys(fleet.run).instance("math/2"))
    monkeypatch.undo()
    fleet.scale("math", 4)
    assert fleet.labels == {"math": [f"math/{at}" for at in range(4)]}


def test_a_place_that_was_left_is_used_again(valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet) -> None:
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math", replicas=2, actor_cpus=0.9)]))
    fleet.scale("math", 1)
    fleet.scale("math", 2)
    assert fleet.labels == {"math": ["math/0", "math/1"]}
    assert len(RolloutClient.run_sync(valkey.url, rows_for(["math"], 4), 4, run=fleet.run)) == 16


async def test_a_drain_frees_what_its_supervisor_has_not_come_to_free(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain ends the watch over an instance that has just died, and its groups waited for their lease."""
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math", replicas=2, row_s=0.1)]))
    bury, freeing, held = FleetTransitions.bury, threading.Event(), list[int]()

    async def bury_late(steps: FleetTransitions, *who: str) -> int:
        if not freeing.is_set():
            freeing.set()
            await asyncio.sleep(60)
        held.append(await bury(steps, *who))
        return held[-1]

    monkeypatch.setattr(FleetTransitions, "bury", bury_late)
    async with open_batch(fleet, 40) as batch:
        groups = aiter(batch)
        got = [await anext(groups)]
        os.kill(next(status.pid for status in fleet.status() if status.label == "math/0"), signal.SIGKILL)
        await asyncio.to_thread(freeing.wait)
        await asyncio.to_thread(fleet.drain, "math/0")
        assert [count > 0 for count in held] == [True]
        got += [group async for group in groups]
    assert len(got) == 40


async def test_what_is_drained_twice_is_gone_for_both_and_its_successor_stays(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    """Of two who asked for the same drain neither was told that it was done: the first had been superseded, and when
    the second had its turn there was no such instance.
    """
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math", replicas=2)]))
    before = fleet.status()[1].pid
    engine = fleet._running()  # pyright: ignore[reportPrivateUsage]

    async def drain_twice_around_a_scale() -> None:
        await asyncio.gather(engine.drain("math/1"), engine.scale("math", 2), engine.drain("math/1"))

    await asyncio.to_thread(fleet._thread.run, drain_twice_around_a_scale())  # pyright: ignore[reportPrivateUsage]
    assert fleet.labels == {"math": ["math/0", "math/1"]}
    assert fleet.status()[1].pid != before


def test_a_change_that_the_end_breaks_off_is_told_as_that(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    """Plain code got asyncio's `CancelledError`, which passes by every `except Exception`; of two changes the second
    could wait for ever.
    """
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math")]))
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        begun, start = threading.Event(), Launcher.start

        async def start_slowly(launcher: Launcher, instance: Instance) -> None:
            await start(launcher, instance)
            begun.set()
            await asyncio.sleep(600)

        patch.setattr(Launcher, "start", start_slowly)
        changes = [pool.submit(fleet.scale, "math", 2)]
        assert begun.wait(60)
        changes.append(pool.submit(fleet.drain, "math"))
        fleet.shutdown()
        for change in changes:
            with pytest.raises(FleetError, match="is shut down; start it again"):
                change.result(30)


def test_an_instance_that_hangs_in_its_end_is_named_and_the_others_stop(
    valkey: EmbeddedBroker, tmp_path: Path, broker: Redis
) -> None:
    config = fleet_config(
        valkey.url,
        tmp_path,
        [shard("good", replicas=2), shard("stuck", hang_in_stop=True)],
        fleet={"stop_timeout_s": 2},
    )
    fleet = ShardFleet.start(config)
    pids = {status.label: status.pid for status in fleet.status()}
    with pytest.raises(
        FleetError, match=r"1 instances .* would not stop and were killed: .*instance stuck\) did not finish stop"
    ):
        fleet.shutdown()
    assert {pid for _, pid, _ in events(tmp_path, "stopping")} == set(pids.values())
    assert ray.cluster_resources()["CPU"] == 2.0
    assert [*broker.scan_iter(match=f"rolloutbus:{{{fleet.run}}}:*")] == []
    fleet.shutdown()


def test_what_is_left_at_the_end_of_the_patience_is_killed_and_named(
    valkey: EmbeddedBroker, tmp_path: Path, broker: Redis
) -> None:
    """It was killed without a word."""
    fleet = ShardFleet.start(fleet_config(valkey.url, tmp_path, [shard("good"), shard("stuck", hang_in_stop=True)]))
    with pytest.raises(FleetError, match=r"^1 instances .*: shard 'stuck'.* had not stopped after 3 s$"):
        fleet.shutdown(drain=False, kill_after_s=3)
    assert ray.cluster_resources()["CPU"] == 2.0
    assert [*broker.scan_iter(match=f"rolloutbus:{{{fleet.run}}}:*")] == []


def test_asking_a_run_without_a_fleet_is_refused_at_once(valkey: EmbeddedBroker) -> None:
    settings = BrokerSettings(url=valkey.url, lease_s=1.0, renew_every_s=0.2)
    with pytest.raises(FleetError, match="no fleet runs for run 'nobody-here'"):
        request_change(settings, "nobody-here", Request.to_scale("math", 2))

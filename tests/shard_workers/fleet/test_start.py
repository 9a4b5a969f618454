"""Starting a fleet: everything up and published, or nothing left and the culprit named."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ConfigError, FleetError
from rolloutbus.shard_workers import ShardFleet, ShardSetupError
from rolloutbus.shard_workers.fleet.instances import Instance, InstanceTroubleError, Launcher
from rolloutbus.trainer import RolloutClient

from tests.shard_workers.fleet.conftest import keys_of
from tests.shard_workers.fleet.fleets import Redis, StartFleet, fleet_config, open_batch, ray, rows_for, shard
from tests.shard_workers.fleet.stacks import events

pytestmark = pytest.mark.usefixtures("local_ray")


def free_cpus() -> float:
    """What nobody has; Ray's own view of it lags a little, so all being free is waited for."""
    deadline = time.monotonic() + 5
    while (free := ray.available_resources().get("CPU", 0.0)) < 2.0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def still_there(pids: Iterable[int]) -> list[Any]:
    """Processes that are alive, a few seconds being allowed to die in."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return psutil.wait_procs(processes, timeout=5)[1]


def run_rows(fleet: ShardFleet, routes: list[str], groups: int = 6) -> list[Any]:
    return RolloutClient.run_sync(
        fleet.broker.url, rows_for(routes, groups), 4, run=fleet.run, settings={"lease_s": 3.0}
    )


def test_a_batch_goes_through_all_shards_and_shutdown_twice_leaves_nothing(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, broker: Redis
) -> None:
    config = fleet_config(valkey.url, tmp_path, [shard("math", replicas=2), shard("words", ["sort", "brevity"])])
    fleet = start_fleet(config, base_urls=["http://127.0.0.1:1/v1"], model_name="m")
    assert fleet.route_map == {"math": "math", "sort": "words", "brevity": "words"}
    assert fleet.labels == {"math": ["math/0", "math/1"], "words": ["words"]}
    assert [status.ports for status in fleet.status()] == [(20000, 20050), (20050, 20100), (20500, 20550)]

    results = run_rows(fleet, ["math", "sort", "brevity"])

    assert [result["row"] for result in results] == list(range(24))
    assert results[0]["model"] == [["http://127.0.0.1:1/v1"], "m"]
    processes = {status.pid for status in fleet.status()}
    assert {result["pid"] for result in results} <= processes
    fleet.shutdown()
    fleet.shutdown()
    assert not still_there(processes)
    assert free_cpus() == 2.0
    assert keys_of(broker, fleet.run) == {"events"}
    assert fleet.wait(0) == ""
    with pytest.raises(FleetError, match="is shut down"):
        fleet.scale("math", 3)


def test_unsharded_is_one_shard_and_every_route_leads_to_it(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    config = fleet_config(valkey.url, tmp_path, [])
    config["env"]["nemo_gym"] = {"folder": str(tmp_path), "hosts": ["a"], "policy": {"kept": True}}
    config["rolloutbus"]["fleet"]["actor_cpus"] = 0.5
    fleet = start_fleet(config)
    assert (fleet.route_map, fleet.labels) == ({"*": "nemo_gym"}, {"nemo_gym": ["nemo_gym"]})
    assert len(run_rows(fleet, ["whatever", "a"])) == 24


def test_the_shard_that_fails_is_named_with_its_traceback_and_nothing_is_left(
    valkey: EmbeddedBroker, tmp_path: Path, broker: Redis
) -> None:
    config = fleet_config(
        valkey.url,
        tmp_path,
        [shard("one"), shard("two", replicas=2, fail="the {judge} is away", after=2), shard("three")],
    )
    with pytest.raises(ShardSetupError) as caught:
        ShardFleet.start(config)
    message = str(caught.value)
    assert "shard 'two', replica " in message
    assert "ForeignError: the {judge} is away" in message
    assert "stacks.py" in message, "the traceback shows where"
    started = {pid for event in ("starting", "started") for _, pid, _ in events(tmp_path, event)}
    assert len(started) >= 3, "the others were up, and one of the two came to its failure"
    assert not still_there(started)
    assert free_cpus() == 2.0
    assert keys_of(broker, config["rolloutbus"]["run"]) == set()


def test_a_start_that_fails_late_starts_nothing_again(
    valkey: EmbeddedBroker, tmp_path: Path, broker: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had begun were stopped under the eyes of their watch, which took it for a death and started another
    process in the place that was being given back.
    """
    shards = [shard("good"), shard("slow", hang_in_stop=True), shard("bad")]
    config = fleet_config(valkey.url, tmp_path, shards, fleet={"stop_timeout_s": 3, "restart_backoff_s": 0})
    begin = Launcher.begin

    async def begin_but_one(launcher: Launcher, instance: Instance) -> None:
        if instance.label == "bad":
            raise InstanceTroubleError("bad: its process died during begin", dead=True)
        await begin(launcher, instance)

    monkeypatch.setattr(Launcher, "begin", begin_but_one)
    with pytest.raises(ShardSetupError, match="bad: its process died during begin; nothing is left running"):
        ShardFleet.start(config)
    assert len(events(tmp_path, "starting")) == 3
    assert free_cpus() == 2.0
    assert keys_of(broker, config["rolloutbus"]["run"]) == set(), "nobody has died"


def test_a_stack_that_takes_too_long_ends_the_start(valkey: EmbeddedBroker, tmp_path: Path) -> None:
    config = fleet_config(valkey.url, tmp_path, [shard("slow", start_s=60)], fleet={"startup_timeout_s": 2})
    with pytest.raises(ShardSetupError, match=r"shard 'slow', replica 0 .* did not finish start within 2 s"):
        ShardFleet.start(config)
    assert free_cpus() == 2.0


def test_an_environment_that_cannot_be_made_is_named(valkey: EmbeddedBroker, tmp_path: Path) -> None:
    config = fleet_config(valkey.url, tmp_path, [shard("math")])
    config["rolloutbus"]["environment"] = "tests.shard_workers.fleet.stacks:ShyEnvironment"
    with pytest.raises(ShardSetupError, match=r"shard 'math'.*no licence for this machine"):
        ShardFleet.start(config)


def test_a_route_in_two_shards_is_refused(valkey: EmbeddedBroker, tmp_path: Path, broker: Redis) -> None:
    config = fleet_config(valkey.url, tmp_path, [shard("a", ["same"]), shard("b", ["same"])])
    with pytest.raises(ShardSetupError, match="'same'"):
        ShardFleet.start(config)
    assert keys_of(broker, config["rolloutbus"]["run"]) == set()


def test_bundles_that_fit_nowhere_are_counted(valkey: EmbeddedBroker, tmp_path: Path) -> None:
    config = fleet_config(
        valkey.url, tmp_path, [shard("a", actor_cpus=1.5), shard("b", actor_cpus=1.5)], fleet={"placement_timeout_s": 1}
    )
    with pytest.raises(ShardSetupError) as caught:
        ShardFleet.start(config)
    message = str(caught.value)
    assert "2 bundles (2 of 1.5 CPU each) could not be placed under PACK within 1 s" in message
    assert "1 nodes with 2 CPUs" in message
    assert "2 CPUs are free" in message
    assert "PACK" in message


def test_a_second_fleet_is_refused_and_replace_takes_over(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    config = fleet_config(valkey.url, tmp_path, [shard("math")])
    first = start_fleet(config)
    with pytest.raises(FleetError, match=rf"has a fleet already \(.*process {os.getpid()}\); .*replace=True"):
        ShardFleet.start(config)

    second = start_fleet(config, replace=True)

    reason = first.wait(20)
    assert reason is not None
    assert "another fleet has run" in reason
    assert {r["pid"] for r in run_rows(second, ["math"])} == {second.status()[0].pid}
    assert [status.restarts for status in second.status()] == [0]


async def test_other_routes_are_refused_while_a_batch_is_open(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    config = fleet_config(valkey.url, tmp_path, [shard("math", row_s=0.3)])
    first = start_fleet(config)
    other = fleet_config(valkey.url, tmp_path, [shard("chess")])
    other["rolloutbus"]["run"] = first.run
    async with open_batch(first, 8) as batch:
        first_group = await anext(aiter(batch))
        with pytest.raises(FleetError, match=f"open batches, {batch.id} among them"):
            ShardFleet.start(other, replace=True)
        assert first.wait(1) is None, "the fleet that is there goes on"
        assert len([group async for group in batch]) + 1 == 8
        assert first_group.results
    assert start_fleet(other, replace=True).route_map == {"chess": "chess"}


def test_what_a_broker_forgets_is_published_again(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, broker: Redis
) -> None:
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [shard("math")]))
    prefix = f"rolloutbus:{{{fleet.run}}}:"
    for key in list(broker.scan_iter(match=prefix + "*")):
        broker.delete(key)
    assert len(run_rows(fleet, ["math"])) == 24


def test_twenty_stacks_on_one_machine_start_side_by_side_and_share_no_port(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet
) -> None:
    spec = shard("many", replicas=20, bind=True, port_range_low=23000, port_range_high=24000)
    gym = {"nemo_gym_log_dir": str(tmp_path / "logs")}
    fleet = start_fleet(fleet_config(valkey.url, tmp_path, [spec], gym=gym))
    ports = sorted(status.ports or (0, 0) for status in fleet.status())
    assert all(high <= low for (_, high), (low, _) in pairwise(ports))
    folders = {detail for _, _, detail in events(tmp_path, "started")}
    assert folders == {str(tmp_path / "logs" / "many" / str(at)) for at in range(20)}


def test_a_broker_out_of_reach_is_said_before_anything_starts(tmp_path: Path) -> None:
    config = fleet_config("redis://127.0.0.1:1/0", tmp_path, [shard("math")], broker={"reconnect_timeout_s": 0.1})
    with pytest.raises(ConnectionError, match="check that the broker runs"):
        ShardFleet.start(config)
    assert events(tmp_path, "starting") == []


def test_a_wrong_config_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`env\.nemo_gym` is missing"):
        ShardFleet.start({})

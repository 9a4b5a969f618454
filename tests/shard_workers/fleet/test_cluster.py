"""Several nodes, simulated: instances on nodes of their own, too few nodes, and a node that goes away."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import FleetError
from rolloutbus.shard_workers import ShardFleet, ShardSetupError
from rolloutbus.trainer import RolloutClient

from tests.shard_workers.fleet.fleets import StartFleet, fleet_config, open_batch, ray, rows_for, shard

# A node that falls silent is dead after seconds instead of a quarter of a minute.
HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def cluster(ray_folder: str) -> Iterator[Any]:
    """A head without CPUs and three nodes with two each."""
    made = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": ray_folder, "_system_config": HEALTH},
    )
    fill(made, 3)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def fill(cluster: Any, count: int) -> None:
    """At least so many nodes with places."""
    while len(cluster.worker_nodes) < count:
        cluster.add_node(num_cpus=2, include_dashboard=False)


def nodes_of(fleet: ShardFleet) -> dict[str, str]:
    return {status.label: status.node for status in fleet.status()}


def test_stacks_stand_on_nodes_of_their_own_also_those_that_are_added(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, cluster: Any
) -> None:
    config = fleet_config(valkey.url, tmp_path, [shard("math"), shard("words")], strategy="STRICT_SPREAD")
    fleet = start_fleet(config)
    assert len(set(nodes_of(fleet).values())) == 2
    fleet.scale("math", 2)
    assert len(set(nodes_of(fleet).values())) == 3
    fleet.scale("math", 1)
    assert len(RolloutClient.run_sync(valkey.url, rows_for(["math", "words"], 8), 4, run=fleet.run)) == 32


def test_too_few_nodes_are_counted(valkey: EmbeddedBroker, tmp_path: Path, cluster: Any) -> None:
    config = fleet_config(
        valkey.url,
        tmp_path,
        [shard("math", replicas=4, actor_cpus=1)],
        strategy="STRICT_SPREAD",
        fleet={"placement_timeout_s": 2},
    )
    with pytest.raises(ShardSetupError) as caught:
        ShardFleet.start(config)
    message = str(caught.value)
    assert "4 bundles (4 of 1 CPU each) could not be placed under STRICT_SPREAD within 2 s" in message
    assert "4 nodes with 0, 2, 2, 2 CPUs" in message
    assert "on one machine, set `env.nemo_gym.placement_strategy: PACK`" in message


def test_the_example_for_several_nodes_runs_as_written(
    valkey: EmbeddedBroker, start_fleet: StartFleet, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = Path(__file__).parents[3]
    monkeypatch.chdir(top)
    monkeypatch.setenv("REDIS_URL", valkey.url)
    fleet = start_fleet(str(top / "examples" / "cluster.yaml"))
    assert fleet.run == "cluster"
    assert sorted(nodes_of(fleet)) == ["math", "words/0", "words/1"]
    assert len(set(nodes_of(fleet).values())) == 3
    prompts = [json.loads(line) for line in (top / "examples" / "rows.jsonl").read_text().splitlines()]
    rows = [dict(prompt) for prompt in prompts for _ in range(4)]
    results = RolloutClient.run_sync(valkey.url, rows, 4, run="cluster")
    assert len(results) == len(rows)
    assert {result["reward"] for result in results} > {0.0, 1.0}


@pytest.mark.parametrize("graceful", [True, False])
async def test_a_node_removed_in_the_middle_of_a_batch_costs_no_row(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, cluster: Any, graceful: bool
) -> None:
    config = fleet_config(
        valkey.url, tmp_path, [shard("math", replicas=2, row_s=0.05)], strategy="STRICT_SPREAD", workers={"slots": 2}
    )
    fleet = start_fleet(config)
    cluster.add_node(num_cpus=2, include_dashboard=False)
    async with open_batch(fleet, 60) as batch:
        groups = aiter(batch)
        got = [await anext(groups)]
        victim = next(node for node in cluster.worker_nodes if node.node_id == nodes_of(fleet)["math/0"])
        await asyncio.to_thread(cluster.remove_node, victim, graceful)
        got += [group async for group in groups]
    assert sorted(group.group_index for group in got) == list(range(60))
    assert batch.counts.failed == 0


async def test_without_a_spare_node_the_others_carry_on_and_the_fleet_still_ends_at_once(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, cluster: Any
) -> None:
    config = fleet_config(
        valkey.url,
        tmp_path,
        [shard("math", replicas=3, row_s=0.05)],
        strategy="STRICT_SPREAD",
        workers={"slots": 2},
        fleet={"stop_timeout_s": 60},
    )
    fleet = start_fleet(config)
    async with open_batch(fleet, 30) as batch:
        groups = aiter(batch)
        got = [await anext(groups)]
        victim = next(node for node in cluster.worker_nodes if node.node_id == nodes_of(fleet)["math/1"])
        await asyncio.to_thread(cluster.remove_node, victim)
        got += [group async for group in groups]
    assert len(got) == 30
    assert {status.label: status.state for status in fleet.status()}["math/1"] == "restarting"
    begun = time.monotonic()
    await asyncio.to_thread(fleet.shutdown)
    assert time.monotonic() - begun < 20


def test_a_place_that_was_left_on_a_lost_node_is_not_waited_for(
    valkey: EmbeddedBroker, tmp_path: Path, start_fleet: StartFleet, cluster: Any
) -> None:
    """Found with chaos on a fleet: `scale` took it, and waited for as long as a stack may take to start."""
    fill(cluster, 3)
    config = fleet_config(
        valkey.url,
        tmp_path,
        [shard("math", replicas=2)],
        strategy="STRICT_SPREAD",
        fleet={"placement_timeout_s": 1},
    )
    fleet = start_fleet(config)
    fleet.scale("math", 1)
    for node in [node for node in cluster.worker_nodes if node.node_id not in nodes_of(fleet).values()]:
        cluster.remove_node(node, allow_graceful=False)
    while sum(node["Alive"] for node in ray.nodes()) > 2:
        time.sleep(0.1)
    with pytest.raises(FleetError, match=r"could not be placed on nodes of their own within 1 s"):
        fleet.scale("math", 2)
    fill(cluster, 3)
    fleet.scale("math", 2)
    assert len(set(nodes_of(fleet).values())) == 2

"""The fleet's configuration: where it may come from, what each key means, and what is said of each mistake."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rolloutbus.broker.errors import ConfigError
from rolloutbus.shard_workers import ShardConfigError
from rolloutbus.shard_workers.fleet_config import read_fleet_config

SHARDED: dict[str, Any] = {
    "policy_name": "m",
    "rolloutbus": {
        "run": "exp1",
        "environment": "nemo_gym",
        "broker": {"url": "redis://broker:6379/0", "lease_s": 5},
        "workers": {"slots": 8, "shards": {"math": {"slots": 2, "commit": "group"}}},
        "fleet": {"max_restarts": 3},
    },
    "env": {
        "nemo_gym": {
            "policy": "${policy_name}",
            "nemo_gym_log_dir": "/logs",
            "placement_strategy": "PACK",
            "shards": [
                {
                    "name": "math",
                    "config_paths": ["math.yaml"],
                    "replicas": 2,
                    "port_range_low": 20000,
                    "port_range_high": 20200,
                },
                {
                    "name": "words",
                    "config_paths": ["words.yaml"],
                    "actor_cpus": 2,
                    "port_range_low": 21000,
                    "port_range_high": 21030,
                },
            ],
        }
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    config = OmegaConf.create(copy.deepcopy(SHARDED))
    OmegaConf.update(config, path, value, force_add=True)
    return OmegaConf.to_container(config)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("form", ["dict", "omegaconf", "file"])
def test_all_sources_read_alike_and_stay_as_they_are(form: str, tmp_path: Path) -> None:
    OmegaConf.save(OmegaConf.create(SHARDED), tmp_path / "run.yaml")
    config: Any = {
        "dict": copy.deepcopy(SHARDED),
        "omegaconf": OmegaConf.create(SHARDED),
        "file": tmp_path / "run.yaml",
    }[form]
    found = read_fleet_config(config)
    assert (found.run, found.environment, found.broker.lease_s) == ("exp1", "nemo_gym", 5.0)
    assert {name: (at.slots, at.commit) for name, at in found.workers.items()} == {
        "math": (2, "group"),
        "words": (8, "row"),
    }
    assert (found.fleet.max_restarts, found.fleet.placement_timeout_s, found.fleet.startup_timeout_s) == (
        3,
        180.0,
        1800.0,
    )
    assert [found.actor_cpus(shard) for shard in found.plan.shards] == [8.0, 2.0]
    merged = found.instance_config(found.shard("math"), 1, replica_index=1, base_urls=["http://m"], model_name="m")
    assert merged == {
        "policy": "m",
        "config_paths": ["math.yaml"],
        "config_dir": str(tmp_path if form == "file" else Path.cwd()),
        "nemo_gym_log_dir": "/logs/math/1",
        "port_range_low": 20050,
        "port_range_high": 20100,
        "policy_base_url": ["http://m"],
        "policy_model_name": "m",
    }
    if form != "file":
        assert config == SHARDED


def test_config_dir_may_be_said() -> None:
    found = read_fleet_config({**SHARDED, "config_dir": "/configs"})
    assert found.instance_config(found.shard("words"), 0)["config_dir"] == "/configs"


def test_the_environment_names_the_broker_where_the_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:1/0")
    assert read_fleet_config(SHARDED).broker.url == "redis://broker:6379/0"
    assert read_fleet_config(changed("rolloutbus.broker.url", None)).broker.url == "redis://elsewhere:1/0"
    assert read_fleet_config({"env": {"nemo_gym": {}}}).broker.url == "redis://elsewhere:1/0"


def test_unsharded_is_one_shard_that_takes_everything() -> None:
    found = read_fleet_config({"env": {"nemo_gym": {"config_paths": ["a.yaml"], "agent": {"x": 1}, "scalar": 2}}})
    (shard,) = found.plan.shards
    assert (shard.name, shard.replicas, found.sharded, found.run) == ("nemo_gym", 1, False, "default")
    merged = found.instance_config(shard, 0)
    del merged["config_dir"]
    assert merged == {"config_paths": ["a.yaml"], "agent": {"x": 1}, "scalar": 2}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "rolloutbus.fleat",
            {},
            r"rolloutbus\.fleat is not a known key \(did you mean 'fleet'\?\); known here: broker, .*, workers",
        ),
        (
            "rolloutbus.broker.lese_s",
            3,
            r"rolloutbus\.broker\.lese_s is not a known key \(did you mean 'lease_s'\?\); known",
        ),
        ("rolloutbus.broker.lease_s", "long", r"rolloutbus\.broker\.lease_s: .*'long'"),
        ("rolloutbus.broker", 3, r"rolloutbus\.broker: .*3"),
        ("rolloutbus.fleet.max_restarts", -1, r"rolloutbus\.fleet\.max_restarts: .*-1"),
        ("rolloutbus.fleet.actor_cpus", float("inf"), r"rolloutbus\.fleet\.actor_cpus: .*inf"),
        ("rolloutbus.fleet.ports_per_replica", 9, r"rolloutbus\.fleet\.ports_per_replica: .*equal to 10, but is 9"),
        ("rolloutbus.workers.slots", 0, r"rolloutbus\.workers\.slots: .*0"),
        ("rolloutbus.workers.shards.math.slotz", 1, r"rolloutbus\.workers\.shards\.math\.slotz is not a known key"),
        (
            "rolloutbus.workers.shards.maths",
            {},
            r"rolloutbus\.workers\.shards\.maths: there is no such shard \(did you mean 'math'\?\)",
        ),
        ("rolloutbus.workers.shards", 3, r"rolloutbus\.workers\.shards must be a mapping"),
        ("rolloutbus.run", "a b", r"run 'a b' cannot be a name"),
        ("rolloutbus", 3, r"rolloutbus must be a mapping, but is 3"),
        ("env.nemo_gym", 3, r"`env\.nemo_gym` must be a mapping"),
        ("env.nemo_gym.shards", 3, r"`env\.nemo_gym\.shards` must be a list"),
        ("rolloutbus.run", "${nowhere}", r"rolloutbus\.run: .*nowhere"),
    ],
)
def test_each_mistake_is_told_with_its_key(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_fleet_config(changed(path, value))


def test_files_that_are_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config file"):
        read_fleet_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,\nb: 2")
    with pytest.raises(ConfigError, match=r"broken\.yaml, line \d+ is no valid YAML"):
        read_fleet_config(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match=r"list\.yaml holds a list"):
        read_fleet_config(tmp_path / "list.yaml")
    with pytest.raises(ShardConfigError, match=r"`env\.nemo_gym` is missing"):
        read_fleet_config({})


def test_ports_of_all_slots_are_disjoint_and_end_with_the_range() -> None:
    found = read_fleet_config(SHARDED)
    math, words = found.plan.shards
    assert [found.port_range(math, slot) for slot in range(4)] == [(20000 + 50 * s, 20050 + 50 * s) for s in range(4)]
    with pytest.raises(
        ShardConfigError, match=r"shard 'math' has ports for 4 replicas \(20000 to 20199, 50 each\) and all are in use"
    ):
        found.port_range(math, 4)
    assert found.port_range(words, 0) == (21000, 21030), "a narrow range is given whole to the one that is there"
    alone = read_fleet_config(changed("env.nemo_gym.placement_strategy", "STRICT_SPREAD"))
    assert alone.port_range(alone.plan.shards[0], 7) == (20000, 20200), "a node of its own has the whole range"


@pytest.mark.parametrize("each", [10, 11, 37, 200, 1000])
@pytest.mark.parametrize("strategy", ["SPREAD", "STRICT_PACK", "PACK"])
def test_no_two_slots_share_a_port_however_the_range_is_cut(strategy: str, each: int) -> None:
    """With `ports_per_replica: 5` two replicas on one node were both given the whole range."""
    config = changed("rolloutbus.fleet.ports_per_replica", each)
    config["env"]["nemo_gym"]["placement_strategy"] = strategy
    found = read_fleet_config(config)
    math = found.plan.shards[0]
    ranges = [found.port_range(math, slot) for slot in range(found.port_slots(math))]
    assert [port for ports in ranges for port in range(*ports or ())] == list(range(20000, 20200))
    assert len(ranges) >= math.replicas


def test_functions_open_no_port_and_need_none() -> None:
    """A first config of one's own was refused for missing ranges, and `scale` for ranges that were full."""
    config = changed("rolloutbus.environment", "functions")
    given = read_fleet_config(config)
    assert [given.port_range(shard, 99) for shard in given.plan.shards] == [None, None]
    math, words = config["env"]["nemo_gym"]["shards"]
    math |= {"port_range_low": None, "port_range_high": None}
    words |= {"port_range_low": 1, "port_range_high": 2}
    found = read_fleet_config(config)
    assert found.plan.total_instances == 3
    assert "port_range_low" not in found.instance_config(found.shard("math"), 99)
    config["rolloutbus"]["environment"] = "nemo_gym"
    with pytest.raises(ShardConfigError, match="needs `port_range_low` and `port_range_high`"):
        read_fleet_config(config)


def test_reading_a_plan_and_a_config_does_not_import_ray() -> None:
    program = (
        "import sys, rolloutbus.shard_workers, rolloutbus.shard_workers.fleet_config, rolloutbus.trainer, "
        "rolloutbus.broker.fleet_transitions; assert 'ray' not in sys.modules; "
        "assert 'ShardFleet' in rolloutbus.shard_workers.__all__; rolloutbus.shard_workers.ShardFleet; "
        "assert 'ray' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

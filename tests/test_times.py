"""Every time that can be set is finite and bounded, whatever model it is a field of."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel
from rolloutbus.broker.errors import ConfigError
from rolloutbus.broker.settings import LONGEST_S, BrokerSettings, settings_from
from rolloutbus.broker.shard_records import ShardRecord
from rolloutbus.shard_workers.environments.nemo_gym.settings import GymSettings
from rolloutbus.shard_workers.environments.policy import PolicySettings
from rolloutbus.shard_workers.fleet_config import FleetSettings, read_fleet_config
from rolloutbus.shard_workers.worker_settings import WorkerSettings

TIMES = [
    (model, name)
    for model in (BrokerSettings, ShardRecord, WorkerSettings, FleetSettings, GymSettings, PolicySettings)
    for name, field in model.model_fields.items()
    if field.annotation is float and name.endswith("_s")
]


def test_each_model_has_times():
    assert len({model for model, _ in TIMES}) == 6


@pytest.mark.parametrize("value", [float("inf"), float("nan"), LONGEST_S + 1, 1e300])
@pytest.mark.parametrize(("model", "name"), TIMES)
def test_a_time_that_never_ends_is_refused_by_its_key(model: type[BaseModel], name: str, value: float):
    with pytest.raises(ConfigError, match=rf"^here\.{name}: "):
        settings_from(model, {name: value}, "here")


def test_the_longest_times_reach_the_broker_and_come_back():
    record = ShardRecord(group_timeout_s=LONGEST_S)
    assert ShardRecord.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize("written", [".inf", "1.0e+300"])
def test_no_limit_in_a_config_is_refused_with_its_whole_path(tmp_path: Path, written: str):
    config = tmp_path / "c.yaml"
    config.write_text(f"rolloutbus: {{workers: {{group_timeout_s: {written}}}}}\nenv: {{nemo_gym: {{}}}}\n")
    with pytest.raises(ConfigError, match=r"^rolloutbus\.workers\.group_timeout_s: "):
        read_fleet_config(config)

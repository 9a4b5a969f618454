"""docs/settings.md names every key there is, each with the default that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers.fleet_config import FleetSettings
from rolloutbus.shard_workers.plan_spec import SHARD_SPEC_KEYS, SHARDING_CONFIG_KEYS
from rolloutbus.shard_workers.worker_settings import WorkerSettings

PAGE = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")


def rows_under(heading: str) -> dict[str, str]:
    """Key and default of each line of the tables below a heading."""
    _, _, rest = PAGE.partition(f"\n## {heading}\n")
    lines = [line.split("|")[1:3] for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {key: default.strip() for names, default in lines for key in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("`rolloutbus.broker`", BrokerSettings),
        ("`rolloutbus.workers`", WorkerSettings),
        ("`rolloutbus.fleet`", FleetSettings),
    ],
)
def test_every_setting_stands_there_with_its_default(heading: str, model: type[BaseModel]) -> None:
    told = rows_under(heading)
    defaults = {name: field.default for name, field in model.model_fields.items()}
    assert list(told) == list(defaults)
    for name, default in defaults.items():
        words = "none" if default is None else f"`{default}`" if isinstance(default, str) else f"{default:.15g}"
        assert told[name] == words, name


def test_every_key_of_the_plan_stands_there() -> None:
    assert rows_under("`env.nemo_gym`: the plan").keys() >= SHARD_SPEC_KEYS | SHARDING_CONFIG_KEYS

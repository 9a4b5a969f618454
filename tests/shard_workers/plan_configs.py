"""Small Gym configs that the shard plan's tests start from, and both ways of handing one over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf
from rolloutbus.shard_workers.plan import ShardConfigError, ShardPlan, parse_shard_plan

Form = Callable[[dict[str, Any]], Mapping[str, Any]]


def plain(config: dict[str, Any]) -> Mapping[str, Any]:
    return config


def omegaconf_root(config: dict[str, Any]) -> Mapping[str, Any]:
    return OmegaConf.create(config)


def omegaconf_subtree(config: dict[str, Any]) -> Mapping[str, Any]:
    return OmegaConf.create({"env": {"nemo_gym": config}}).env.nemo_gym


either_form = pytest.mark.parametrize("form", [plain, omegaconf_root, omegaconf_subtree])


def shard(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "config_paths": [f"{name}.yaml"]} | settings


def two_shards(**top_level: Any) -> dict[str, Any]:
    """Three inherited entries: `math` and `code` with a shard each, `judge` common."""
    return {
        "policy_model_name": "policy",
        "math": {"server": {"timeout": 1}},
        "code": {"server": {"timeout": 2}},
        "judge": {"model": {"url": "http://judge"}},
        "common_inherited_overlays": ["judge"],
        "shards": [shard("math", inherited_overlays=["math"]), shard("code", inherited_overlays=["code"])],
    } | top_level


def with_second_shard(**settings: Any) -> dict[str, Any]:
    config = two_shards()
    config["shards"][1] |= settings
    return config


def parsed(config: Mapping[str, Any]) -> ShardPlan:
    plan = parse_shard_plan(config)
    assert plan is not None
    return plan


def refusal(config: Mapping[str, Any]) -> str:
    """The message with which the plan is refused."""
    with pytest.raises(ShardConfigError) as caught:
        parse_shard_plan(config)
    return str(caught.value)

"""The shard plan: from `env.nemo_gym` to `ShardPlan`.

Promises: a plan that is returned can be carried out as far as the config alone can tell; it holds plain
values only; the config is never changed. What stands inside an entry is opaque here, and only entry names are
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from .gym_config import GymConfig, find_gym_config_entries
from .plan_errors import ShardConfigError, ShardSetupError
from .plan_models import ShardSettings, read_settings
from .plan_ownership import entries_by_owner
from .plan_ports import MIN_PORTS_PER_REPLICA, check_ports, replica_port_range
from .plan_spec import (
    DEFAULT_PLACEMENT_STRATEGY,
    DEFAULT_REPLICAS,
    GYM_LOG_DIR_KEY,
    GYM_ROUTABLE_KEYS,
    NEMO_RL_DICT_CONFIG_KEYS,
    PLACEMENT_STRATEGIES,
    SHARD_NAME_PATTERN,
    SHARD_SPEC_KEYS,
    SHARDING_CONFIG_KEYS,
    ShardPlan,
    ShardSpec,
)

__all__ = [
    "DEFAULT_PLACEMENT_STRATEGY",
    "DEFAULT_REPLICAS",
    "GYM_LOG_DIR_KEY",
    "GYM_ROUTABLE_KEYS",
    "MIN_PORTS_PER_REPLICA",
    "NEMO_RL_DICT_CONFIG_KEYS",
    "PLACEMENT_STRATEGIES",
    "SHARDING_CONFIG_KEYS",
    "SHARD_NAME_PATTERN",
    "SHARD_SPEC_KEYS",
    "ShardConfigError",
    "ShardPlan",
    "ShardSetupError",
    "ShardSpec",
    "check_ports",
    "find_gym_config_entries",
    "parse_shard_plan",
    "replica_port_range",
]


def parse_shard_plan(nemo_gym_config: Mapping[str, Any], *, opens_ports: bool = True) -> ShardPlan | None:
    """Read `env.nemo_gym`, plain or OmegaConf; None if it has no `shards`, which is the unsharded run.

    Stacks that open no ports cannot fight for one: with `opens_ports=False` ranges are neither needed nor compared.

    Raises `ShardConfigError` with the key path of everything that is wrong. The rules are those of the shard
    plan section in the documentation; without `shards` none of them applies.
    """
    if _is_unsharded(nemo_gym_config):
        return None
    config = GymConfig(nemo_gym_config)
    settings = read_settings(config)
    owned = entries_by_owner(config, settings)
    plan = ShardPlan(
        shards=[_spec(shard, entries) for shard, entries in zip(settings.shards, owned, strict=True)],
        common_inherited_overlays=frozenset(settings.common_inherited_overlays),
        common_overrides=settings.common_overrides,
        allowed_duplicate_entries=frozenset(settings.allowed_duplicate_entries),
        placement_strategy=settings.placement_strategy,
    )
    if opens_ports:
        check_ports(plan.shards, plan.placement_strategy)
    return plan


def _is_unsharded(config: object) -> bool:
    # Through `keys`, since an OmegaConf node denies having a key whose value is missing or does not resolve.
    return isinstance(config, Mapping) and "shards" not in list(cast("Mapping[object, object]", config).keys())


def _spec(shard: ShardSettings, entries: frozenset[str]) -> ShardSpec:
    return ShardSpec(
        name=shard.name,
        config_paths=shard.config_paths,
        inherited_overlays=entries,
        overrides=shard.overrides,
        replicas=shard.replicas,
        actor_cpus=shard.actor_cpus,
        port_range_low=shard.port_range_low,
        port_range_high=shard.port_range_high,
    )

"""Shard workers: the shard plan, the worker loop, environments, and the Ray fleet that hosts them.

Nothing here imports Ray but the `fleet` folder, whose names are looked up when they are first used.
"""

from __future__ import annotations

from .overlay import apply_shard_log_dir, apply_shard_overlay
from .plan import (
    DEFAULT_PLACEMENT_STRATEGY,
    DEFAULT_REPLICAS,
    GYM_LOG_DIR_KEY,
    GYM_ROUTABLE_KEYS,
    NEMO_RL_DICT_CONFIG_KEYS,
    SHARD_NAME_PATTERN,
    SHARD_SPEC_KEYS,
    SHARDING_CONFIG_KEYS,
    ShardConfigError,
    ShardPlan,
    ShardSetupError,
    ShardSpec,
    find_gym_config_entries,
    parse_shard_plan,
)
from .routes import build_route_shard_map, validate_dataset_routes
from .worker import ShardWorker, WorkerStatistics
from .worker_settings import WorkerSettings

__all__ = [
    "DEFAULT_PLACEMENT_STRATEGY",
    "DEFAULT_REPLICAS",
    "GYM_LOG_DIR_KEY",
    "GYM_ROUTABLE_KEYS",
    "NEMO_RL_DICT_CONFIG_KEYS",
    "SHARDING_CONFIG_KEYS",
    "SHARD_NAME_PATTERN",
    "SHARD_SPEC_KEYS",
    "ShardConfigError",
    "ShardPlan",
    "ShardSetupError",
    "ShardSpec",
    "ShardWorker",
    "WorkerSettings",
    "WorkerStatistics",
    "apply_shard_log_dir",
    "apply_shard_overlay",
    "build_route_shard_map",
    "find_gym_config_entries",
    "parse_shard_plan",
    "validate_dataset_routes",
]

"""Shard workers: the shard plan, the worker loop, environments, and the Ray fleet that hosts them.

Nothing here imports Ray but the `fleet` folder, whose names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .fleet import ShardFleet, as_shard_fleet, shutdown_environments

_NEEDS_RAY = frozenset({"ShardFleet", "as_shard_fleet", "shutdown_environments"})

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
    "ShardFleet",
    "ShardPlan",
    "ShardSetupError",
    "ShardSpec",
    "ShardWorker",
    "WorkerSettings",
    "WorkerStatistics",
    "apply_shard_log_dir",
    "apply_shard_overlay",
    "as_shard_fleet",
    "build_route_shard_map",
    "find_gym_config_entries",
    "parse_shard_plan",
    "shutdown_environments",
    "validate_dataset_routes",
]


def __getattr__(name: str) -> Any:
    """The fleet's names, looked up when they are first used: a worker, a trainer or a checker of plans needs no Ray."""
    if name in _NEEDS_RAY:
        from . import fleet

        return getattr(fleet, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

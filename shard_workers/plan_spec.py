"""The shard plan as plain values: its keys, its defaults, and the two frozen records it is made of.

Nothing here reads a config or checks one. The records hold plain containers only, so they pickle, compare and
print as they look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

SHARDING_CONFIG_KEYS: Final = frozenset(
    {
        "shards",
        "common_inherited_overlays",
        "common_overrides",
        "allowed_duplicate_entries",
        "placement_strategy",
    }
)
"""Settings of the plan itself. Gym never sees them, since it would take an unknown mapping for a server."""

NEMO_RL_DICT_CONFIG_KEYS: Final = frozenset({"effort_levels", "tokenizer_config"})
"""Settings of the trainer under `env.nemo_gym` that are mappings and still no Gym entries."""

SHARD_SPEC_KEYS: Final = frozenset(
    {
        "name",
        "config_paths",
        "inherited_overlays",
        "overrides",
        "replicas",
        "actor_cpus",
        "port_range_low",
        "port_range_high",
    }
)
"""What one item of `shards` may say."""

GYM_ROUTABLE_KEYS: Final = frozenset({"responses_api_agents", "resources_servers"})
"""The server types that a row can name as its route."""

GYM_LOG_DIR_KEY: Final = "nemo_gym_log_dir"
DEFAULT_REPLICAS: Final = 1

# A shard's name becomes a log folder and a part of broker keys, so it must be one safe path component.
SHARD_NAME_PATTERN: Final = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")

DEFAULT_PLACEMENT_STRATEGY: Final = "STRICT_SPREAD"
PLACEMENT_STRATEGIES: Final = (DEFAULT_PLACEMENT_STRATEGY, "SPREAD", "STRICT_PACK", "PACK")

CONFIG_ROOT: Final = "env.nemo_gym"
"""Where the plan stands in the trainer's config; every key path in a message begins with it."""


@dataclass(frozen=True)
class ShardSpec:
    """One shard: the Gym config files it loads, the inherited entries it owns, and how many copies run.

    The port range is half-open: `port_range_high` itself is not used.
    """

    name: str
    config_paths: list[str]
    inherited_overlays: frozenset[str] = frozenset()
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    replicas: int = DEFAULT_REPLICAS
    actor_cpus: float | None = None
    port_range_low: int | None = None
    port_range_high: int | None = None


@dataclass(frozen=True)
class ShardPlan:
    """All shards of a run in the order of the config, and what they share."""

    shards: list[ShardSpec]
    common_inherited_overlays: frozenset[str]
    common_overrides: dict[str, Any]
    allowed_duplicate_entries: frozenset[str]
    placement_strategy: str

    @property
    def total_instances(self) -> int:
        """How many environment stacks run: the sum of all replicas."""
        return sum(shard.replicas for shard in self.shards)

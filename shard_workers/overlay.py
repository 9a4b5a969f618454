"""What one instance's stack is started with: the shard's own slice of the Gym config, and its own log folder.

Promises: inputs are never changed and share no container with the result; the result holds plain dicts and
lists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import OmegaConf

from .gym_config import MISSING, GymConfig, plain_copy
from .plan_errors import ShardConfigError
from .plan_spec import GYM_LOG_DIR_KEY, NEMO_RL_DICT_CONFIG_KEYS, SHARDING_CONFIG_KEYS, ShardPlan, ShardSpec
from .plan_text import key_path, shown


def apply_shard_overlay(base_config: Mapping[str, Any], plan: ShardPlan, shard: ShardSpec) -> dict[str, Any]:
    """Merge the Gym config of one shard out of `env.nemo_gym`.

    Layers, later ones winning and mappings merged deeply: the base's scalars and lists, the inherited entries
    that are common or the shard's own, `common_overrides`, the shard's `overrides`. Then `config_paths` and,
    where the shard has one, the port range are the shard's. Sharding keys, entries of other shards, mappings
    that only the trainer reads, and top-level nulls are gone. A value `"???"` that no layer gives stays for
    Gym's own files. Raises `ShardConfigError` if a kept key has an interpolation that cannot be resolved.
    """
    merged = _inherited(GymConfig(base_config), plan.common_inherited_overlays | shard.inherited_overlays)
    # The plan's values were resolved when it was parsed; resolving them again would eat `${...}` meant for Gym.
    for layer in (plan.common_overrides, shard.overrides):
        merged = _merged(merged, layer)
    # Only now, so that no layer can point a shard at another shard's files.
    merged["config_paths"] = list(shard.config_paths)
    if shard.port_range_low is not None and shard.port_range_high is not None:
        merged |= {"port_range_low": shard.port_range_low, "port_range_high": shard.port_range_high}
    return {key: value for key, value in merged.items() if value is not None and key not in SHARDING_CONFIG_KEYS}


def apply_shard_log_dir(
    gym_config: Mapping[str, Any], shard_name: str, *, replica_index: int | None = None
) -> dict[str, Any]:
    """Give an instance its own log folder: `<dir>/<shard>`, with a replica index `<dir>/<shard>/<replica>`.

    Gym appends each server's log to a file named after the server, so stacks with one folder would
    interleave. A config without a log folder comes back equal. Slashes in the name become underscores.
    """
    config = GymConfig(gym_config)
    # A plain config may hold `${...}` that is meant for Gym by now, so only OmegaConf input is resolved here.
    if OmegaConf.is_config(gym_config):
        result = {key: config.read_open(key) for key in config.keys}
    else:
        result = {key: plain_copy(gym_config[key]) for key in config.keys}
    log_dir = result.get(GYM_LOG_DIR_KEY)
    if log_dir is None or log_dir == "":
        return result
    if log_dir == MISSING or not isinstance(log_dir, (str, os.PathLike)):
        found = shown(cast(object, log_dir))
        raise ShardConfigError(
            f"{key_path(GYM_LOG_DIR_KEY)} must be the path of a folder, but is {found}; set it, or "
            "remove it to log nowhere"
        )
    folder = os.path.join(os.fspath(cast("str | os.PathLike[str]", log_dir)), _one_component(shard_name))
    result[GYM_LOG_DIR_KEY] = folder if replica_index is None else os.path.join(folder, str(replica_index))
    return result


def _inherited(config: GymConfig, allowed_entries: frozenset[str]) -> dict[str, Any]:
    """The base's part: settings that are no mappings, and the allowed entries."""
    hidden = SHARDING_CONFIG_KEYS | NEMO_RL_DICT_CONFIG_KEYS | {"config_paths"}
    hidden |= set(config.entries()) - allowed_entries
    # Hidden keys are not even resolved: what belongs to another shard may depend on what this one lacks.
    return {key: config.read_open(key) for key in config.keys if key not in hidden}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A dict in which `above` wins: mappings are merged, all else is replaced. What `below` holds is reused."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = _merged(cast("dict[str, Any]", old), cast("Mapping[str, Any]", value))
        else:
            result[key] = plain_copy(value)
    return result


def _one_component(name: str) -> str:
    return name.replace("/", "_").replace("\\", "_")

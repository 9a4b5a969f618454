"""The keys of a shard's config that are for us and not for Gym, and the checks that need both. Pure.

They are scalars with a common prefix, because Gym takes any mapping for a server, and because scalars are shared by
all shards and may be overridden in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field

from ....broker.errors import ConfigError
from ....broker.settings import Seconds, settings_from
from .errors import GroupSizeError

PREFIX = "rolloutbus_"
GROUP_SIZE_KEY = "num_rollouts_per_prompt"
# Keys that other parts of rolloutbus put beside Gym's.
_FOREIGN = frozenset({"config_dir"})


class GymSettings(BaseModel):
    """Each is written with the prefix `rolloutbus_` in a shard's config. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Gym itself waits for ever for a model that does not answer.
    row_timeout_s: Seconds = Field(default=1800.0, gt=0)
    # What the trainer's batches have; checked against verifiers that compare siblings when the stack starts.
    num_generations: int | None = Field(default=None, ge=1)
    # Run every server in the worker's own virtual environment, instead of one that Gym builds for each through uv.
    one_venv: bool = False
    # How long servers may take to end by themselves before they are killed.
    stop_grace_s: Seconds = Field(default=3.0, ge=0)


class Verifier(NamedTuple):
    """A resources server that waits for `size` siblings of one prompt."""

    name: str
    size: int


def split_config(config: Mapping[str, Any]) -> tuple[GymSettings, dict[str, Any]]:
    """Our settings, and what Gym is started with; raises `ConfigError` for an unknown key of ours."""
    own = {key.removeprefix(PREFIX): value for key, value in config.items() if key.startswith(PREFIX)}
    settings = settings_from(
        GymSettings, {key: value for key, value in own.items() if value is not None}, "env.nemo_gym (rolloutbus_…)"
    )
    gym = {key: value for key, value in config.items() if not key.startswith(PREFIX) and key not in _FOREIGN}
    folder: object = config.get("config_dir")
    if folder and "config_paths" in gym:
        gym["config_paths"] = [_beside(str(folder), path) for path in _paths(gym["config_paths"])]
    return settings, gym


def _paths(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ConfigError(f"config_paths must be a list of Gym config files, but is {value!r}")
    return [str(path) for path in cast("list[object]", value)]


def _beside(folder: str, path: str) -> str:
    """A path as Gym finds it: in the working folder, else next to the config that names it, else among Gym's own
    files.
    """
    beside = Path(folder) / path
    return str(beside.resolve()) if not Path(path).exists() and beside.is_file() else path


def check_start(verifiers: Mapping[str, Verifier], num_generations: int | None) -> None:
    """Raise `GroupSizeError` for a verifier that the trainer's batches do not fit, where their size is known."""
    for route, verifier in verifiers.items():
        if num_generations is not None and verifier.size != num_generations:
            raise GroupSizeError(_mismatch(route, verifier, f"rolloutbus_num_generations is {num_generations}"))


def check_group(verifiers: Mapping[str, Verifier], route: str, rows: Sequence[Any]) -> None:
    """Raise `GroupSizeError` for a group that its verifier would wait on for ever."""
    verifier = verifiers.get(route)
    if verifier is not None and verifier.size != len(rows):
        raise GroupSizeError(_mismatch(route, verifier, f"this call has {len(rows)} rows"))


def _mismatch(route: str, verifier: Verifier, found: str) -> str:
    return (
        f"route {route!r}: {verifier.name} scores {verifier.size} siblings together ({GROUP_SIZE_KEY}), but {found}; "
        f"set {GROUP_SIZE_KEY} to the trainer's num_generations in the shard's overrides, and keep `rerun: group`"
    )

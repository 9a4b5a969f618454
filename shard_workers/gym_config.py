"""Reading `env.nemo_gym`, whether it is a plain mapping or an OmegaConf node.

Promises: both kinds give the same values; what is read is a plain copy, with interpolations resolved against
the root of the config they stand in (a plain mapping is its own root); the config that is read is never
changed. A key is resolved when it is asked for, so an interpolation that cannot be resolved spoils only what
needs it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import KeyValidationError, MissingMandatoryValue, OmegaConfBaseException

from .plan_errors import ShardConfigError
from .plan_spec import CONFIG_ROOT, NEMO_RL_DICT_CONFIG_KEYS, SHARDING_CONFIG_KEYS
from .plan_text import key_path, shown

MISSING = "???"
"""OmegaConf's mark for a value that somebody has yet to give."""


class GymConfig:
    """One `env.nemo_gym`, read key by key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take any mapping with string keys; anything else is a `ShardConfigError`."""
        if not isinstance(cast(object, config), Mapping):
            raise ShardConfigError(f"{key_path()} must be a mapping, but is {shown(config)}")
        self._config = config
        # Not `in`: an OmegaConf node denies having a key whose value is missing or does not resolve.
        self.keys: list[str] = list(config.keys())
        for key in cast("list[object]", self.keys):
            if not isinstance(key, str):
                raise ShardConfigError(f"{key_path()} has the key {shown(key)}; its keys must be strings: quote it")

    def entries(self) -> list[str]:
        """Sorted names of what Gym could take for a server: see `find_gym_config_entries`."""
        known = SHARDING_CONFIG_KEYS | NEMO_RL_DICT_CONFIG_KEYS
        return sorted(key for key in self.keys if key not in known and self.holds_mapping(key))

    def holds_mapping(self, key: str) -> bool:
        """Whether the key's value is a mapping; a value that is missing or does not resolve is none."""
        # Without OmegaConf where it can be, so that one broken text in a plain config does not hide all entries.
        if not isinstance(self._config, DictConfig):
            value = self._config[key]
            if isinstance(value, Mapping):
                return True
            if not (isinstance(value, str) and "${" in value):
                return False
        try:
            return isinstance(self._root[key], Mapping)
        except (OmegaConfBaseException, ShardConfigError):
            return False

    def read(self, key: str) -> Any:
        """A plain copy of the value, resolved; `ShardConfigError` if any of it is missing or unresolvable."""
        return self._resolved(key, throw_on_missing=True)

    def read_open(self, key: str) -> Any:
        """Like `read`, but a missing value stays `"???"`: a later layer, or Gym's own files, may give it."""
        if OmegaConf.is_missing(self._root, key):
            return MISSING
        return self._resolved(key, throw_on_missing=False)

    def _resolved(self, key: str, *, throw_on_missing: bool) -> Any:
        try:
            value: Any = self._root[key]
            if not OmegaConf.is_config(value):
                return cast(object, value)
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=throw_on_missing)
        except OmegaConfBaseException as error:
            raise _unreadable(error, self.keys, self._root) from None

    @cached_property
    def _root(self) -> DictConfig:
        if isinstance(self._config, DictConfig):
            return self._config
        try:
            # Opaque Python objects may stand in an entry; only OmegaConf input is limited to what YAML knows.
            return cast(DictConfig, OmegaConf.create(plain_copy(self._config), flags={"allow_objects": True}))
        except OmegaConfBaseException as error:
            raise _unreadable(error, self.keys) from None


def find_gym_config_entries(nemo_gym_config: Mapping[str, Any]) -> list[str]:
    """Sorted top-level keys whose value is a mapping and that are no setting of the plan or the trainer.

    Scalars, lists and nulls are no entries. This is broader than Gym's own rule, which needs Gym to be
    installed; an entry too many has to be claimed by a shard, an entry too few would start nowhere.
    """
    return GymConfig(nemo_gym_config).entries()


def plain_copy(value: Any) -> Any:
    """Copy all containers deeply into dicts and lists, OmegaConf nodes resolved; leaves are shared."""
    if OmegaConf.is_config(value):
        try:
            return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            raise _unreadable(error, ()) from None
    if isinstance(value, Mapping):
        return {key: plain_copy(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain_copy(item) for item in cast("list[Any]", value)]
    return value


def _unreadable(
    error: OmegaConfBaseException, keys: Collection[str], root: DictConfig | None = None
) -> ShardConfigError:
    """Say in our words what OmegaConf could not read; a path that begins with one of `keys` is ours to complete."""
    full_key = error.full_key or ""
    ours = not full_key or re.split(r"[.\[]", full_key, maxsplit=1)[0] in keys
    relative = full_key if ours else full_key.removeprefix(f"{CONFIG_ROOT}.")
    within = ours or relative != full_key
    path = key_path(relative, _shard_name(relative, root)) if within else f"`{full_key}`"
    if isinstance(error, MissingMandatoryValue):
        return ShardConfigError(f"{path} is {MISSING!r}, a value that was never given; set it or remove the key")
    reason = str(error).partition("\n")[0].rpartition("while resolving interpolation: ")[2]
    if isinstance(error, KeyValidationError):
        return ShardConfigError(f"{path} has a key that is no string or number: {reason}; quote it")
    return ShardConfigError(
        f"{path} has an interpolation that cannot be resolved: {reason}; correct it (names are looked up from "
        r"the root of the config, `${.x}` from where it stands), or write `\${...}` to hand the text to Gym"
    )


def _shard_name(path: str, root: DictConfig | None) -> object:
    """The name of the shard that the key is in, where it is in one and the name can be read."""
    inside = re.match(r"(shards\[\d+\])", path)
    try:
        return OmegaConf.select(root, f"{inside[1]}.name") if inside and root is not None else None
    except OmegaConfBaseException:
        return None

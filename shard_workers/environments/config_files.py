"""Merges the files of `config_paths` under the config that an environment was started with.

Promises plain containers with every interpolation resolved, and a `ConfigError` that names the file and,
for YAML, the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...broker.errors import ConfigError
from ..yaml_files import load_yaml
from .entry_shapes import is_file_of_gym


def merge_config_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Load each path in order, then put the config's own keys on top; later wins, mappings merge deeply.

    A relative path is looked for in the working folder, then in `config_dir`, the folder of the file that
    names it.
    """
    loaded = [
        load_yaml(_find(path, config.get("config_dir")), "of entries", key="config_paths")
        for path in _paths(config.get("config_paths"))
    ]
    try:
        merged = OmegaConf.merge(_open({}), *loaded, _open(config))
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the merged config does not resolve at {error.full_key or 'its top'}: {reason}") from None
    return cast(dict[str, Any], plain)


def _open(config: Mapping[str, Any]) -> DictConfig:
    # A trainer may hand a Python object to a function through an entry, which YAML's types do not cover.
    return OmegaConf.create(dict(config), flags={"allow_objects": True})


def _paths(value: object) -> list[str]:
    entries = cast(list[object], value) if isinstance(value, list) else [] if value is None else [None]
    paths = [entry for entry in entries if isinstance(entry, str) and entry]
    if len(paths) != len(entries):
        raise ConfigError(f"config_paths: {value!r} is no list of file names")
    return paths


def places_of(path: str, config_dir: object) -> list[Path]:
    """Where a path of `config_paths` is looked for, in this order."""
    folders = [Path.cwd(), *([Path(str(config_dir))] if config_dir else [])]
    return list(dict.fromkeys(folder / path for folder in folders))


def _find(path: str, config_dir: object) -> Path:
    candidates = places_of(path, config_dir)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    gym = "; if it is NeMo Gym's own, say `rolloutbus.environment: nemo_gym`" if is_file_of_gym(path) else ""
    raise ConfigError(
        f"config_paths: there is no file {path!r}; looked for {looked}. Give it relative to one of them{gym}"
    )

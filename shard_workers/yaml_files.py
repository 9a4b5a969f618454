"""Reading a YAML file as a config: what is wrong with it is told with file and line."""

from __future__ import annotations

from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..broker.errors import ConfigError


def load_yaml(path: Path, top_level: str, *, key: str = "") -> DictConfig:
    """The mapping that stands in `path`; interpolations stay as they are.

    `top_level` says what the mapping should hold, `key` which setting named the file. Raises `ConfigError`.
    """
    said = f"{key}: " if key else ""
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{said}there is no config file {path}; give its path from the folder {Path.cwd()}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{said}{path}{line} is no valid YAML: {error.problem or error.context}") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        told = (str(error) or type(error).__name__).partition("\n")[0]
        raise ConfigError(f"{said}{path} cannot be read as a config: {told}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{said}{path} holds a list; its top level must be a mapping {top_level}")
    return loaded

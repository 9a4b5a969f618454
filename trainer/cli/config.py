"""The config file of a command with its `key=value` overrides, and the broker that the command uses with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...broker.errors import ConfigError
from ...broker.settings import broker_url
from ...shard_workers.yaml_files import load_yaml

URL_KEY = "rolloutbus.broker.url"
RUN_KEY = "rolloutbus.run"

ConfigPath = Annotated[
    Path,
    typer.Option(
        "--config", "-c", metavar="FILE", help="YAML with `rolloutbus` and `env.nemo_gym`.", show_default=False
    ),
]
ConfiguredRun = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run's name, in the place of the config's.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Overrides of the config, such as rolloutbus.workers.slots=8.", show_default=False
    ),
]


def load_config(path: Path, overrides: Sequence[str] | None) -> DictConfig:
    """The file with the overrides in it; raises `ConfigError` naming file and line, or the override."""
    root = load_yaml(path, "with `rolloutbus` and `env.nemo_gym`")
    for override in overrides or ():
        _apply(root, override)
    # Relative paths in it are meant from the file's folder, whatever is done with the config from here on.
    if "config_dir" not in root:
        root["config_dir"] = str(path.resolve().parent)
    return root


def configured_url(root: DictConfig, given: str | None) -> str | None:
    """`--broker-url`, else REDIS_URL, else the config's; None where nobody named a broker."""
    named = broker_url(given)
    if named:
        return named
    value = _select(root, URL_KEY)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{URL_KEY} must be a URL such as redis://host:6379/0")
    return value or None


def with_target(root: DictConfig, url: str | None, run: str | None) -> DictConfig:
    """A copy of the config in which broker and run are those of the command."""
    copy = cast(
        DictConfig, OmegaConf.create(OmegaConf.to_container(root, resolve=False), flags={"allow_objects": True})
    )  # pyright: ignore[reportArgumentType, reportUnknownMemberType]
    for key, value in ((URL_KEY, url), (RUN_KEY, run)):
        if value is not None:
            _set(copy, key, value, key)
    return copy


def _select(root: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(root, key)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {_first_line(error)}") from None


def _apply(root: DictConfig, override: str) -> None:
    """Hydra's `+key=value` and `++key=value` set as well, its `~key` blanks a key."""
    key, equals, text = override.lstrip("+").partition("=")
    if key.startswith("~"):
        key, equals, text = key[1:], "=", "null"
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r} is not KEY=VALUE; write for instance rolloutbus.workers.slots=8")
    _set(root, key.strip(), _value(override, text), override)


def _value(override: str, text: str) -> Any:
    """The value as YAML reads it."""
    try:
        parsed = OmegaConf.from_dotlist([f"value={text}"])
        return cast("dict[str, Any]", OmegaConf.to_container(parsed, resolve=False))["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(
            f"override {override!r}: its value is no valid YAML ({_first_line(error)}); quote it for the shell"
        ) from None


def _set(root: DictConfig, key: str, value: Any, said: str) -> None:
    try:
        OmegaConf.update(root, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, AssertionError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"override {said!r} cannot be put into the config: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]

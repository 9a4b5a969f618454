"""The config file of a command with its `key=value` overrides, and the broker that the command uses with it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...broker.errors import ConfigError
from ...broker.settings import broker_url, names_secret, redacted
from ...broker.wording import counted
from ...shard_workers.yaml_files import load_yaml

URL_KEY = "rolloutbus.broker.url"
RUN_KEY = "rolloutbus.run"
_ADDRESS_KEY = "rolloutbus.fleet.address"
CONFIG_DIR_KEY = "config_dir"
ROOTS = ("rolloutbus", "env")
# What people write without what it stands below.
_BELOW = {
    **dict.fromkeys(("run", "environment", "broker", "fleet", "workers"), "rolloutbus"),
    "nemo_gym": "env",
    "shards": "env.nemo_gym",
}
# Nobody else's key is that close to our name, while `env` is near to many, and is only looked for where it is missing.
_ALIKE = {"rolloutbus": 0.85, "env": 0.66}

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
    """The file with the overrides in it; raises `ConfigError` naming file and line, or the override.

    Other programs may have keys beside ours in the file; what looks like ours and is not is refused.
    """
    root = load_yaml(path, "with `rolloutbus` and `env.nemo_gym`")
    _refuse_misspelt(path, [str(key) for key in root])
    for override in overrides or ():
        _apply(root, override)
    # Relative paths in it are meant from the file's folder, whatever is done with the config from here on.
    if CONFIG_DIR_KEY not in root:
        root[CONFIG_DIR_KEY] = str(path.resolve().parent)
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
    return _with(root, {URL_KEY: url, RUN_KEY: run})


def with_address(root: DictConfig, address: str | None) -> DictConfig:
    """A copy of the config with the cluster of `--address` in it, where that was said."""
    return _with(root, {_ADDRESS_KEY: address})


def _with(root: DictConfig, given: Mapping[str, str | None]) -> DictConfig:
    """What options say goes in as it is: an address in brackets is no list of YAML's."""
    copy = cast(
        DictConfig, OmegaConf.create(OmegaConf.to_container(root, resolve=False), flags={"allow_objects": True})
    )  # pyright: ignore[reportArgumentType, reportUnknownMemberType]
    for key, value in given.items():
        if value is not None:
            _set(copy, key, value, f"{key}={value}")
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
        said = _shown(override)
        raise ConfigError(f"override {said!r} is not KEY=VALUE; write for instance rolloutbus.workers.slots=8")
    if not override.startswith("+"):
        _refuse_unknown(root, key.strip(), override)
    _set(root, key.strip(), _value(override, text), override)


def _refuse_misspelt(path: Path, keys: Iterable[str]) -> None:
    """A config may lack `rolloutbus`, so nobody would miss one that is spelt otherwise."""
    there = set(keys)
    for root in ROOTS:
        close = None if root in there else _closest(root, there)
        if close is not None:
            raise ConfigError(f"{path}: the key {close!r} at its top level is not known; did you mean {root!r}?")


def _closest(root: str, keys: Iterable[str]) -> str | None:
    spelt = {key.lower(): key for key in keys}
    close = difflib.get_close_matches(root, spelt, n=1, cutoff=_ALIKE[root])
    return spelt[close[0]] if close else None


def _refuse_unknown(root: DictConfig, key: str, said: str) -> None:
    """Nothing would read it: our own keys stand below two roots, and other programs read the file and not this."""
    top = re.split(r"[.\[]", key.lstrip("["), maxsplit=1)[0].rstrip("]")
    if top in ROOTS or top in root or top == CONFIG_DIR_KEY:
        return
    meant = [f"{_BELOW[top]}.{key}"] if top in _BELOW else []
    meant += [name + key.removeprefix(top) for name in ROOTS if _closest(name, [top])]
    shown = _shown(said)
    new = ", and so nothing to blank" if said.startswith("~") else f"; write +{shown} if it is to be new"
    hint = f"; did you mean {redacted(meant[0])}?" if meant else new
    raise ConfigError(f"override {shown!r}: the config has no {redacted(top)!r}{hint}")


def _shown(override: str) -> str:
    """The override for a message, which may come to a log: without passwords, and without a value that may be one."""
    key, equals, _ = override.partition("=")
    return f"{redacted(key)}=***" if equals and names_secret(key) else redacted(override)


def _why(error: BaseException, override: str) -> str:
    """The error's first line, which may quote a value, where the override has nothing to hide."""
    return _first_line(error) if _shown(override) == override else type(error).__name__


def _value(override: str, text: str) -> Any:
    """The value as YAML reads it."""
    try:
        parsed = OmegaConf.from_dotlist([f"value={text}"])
        return cast("dict[str, Any]", OmegaConf.to_container(parsed, resolve=False))["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        said, why = _shown(override), _why(error, override)
        raise ConfigError(f"override {said!r}: its value is no valid YAML ({why}); quote it for the shell") from None


def _set(root: DictConfig, key: str, value: Any, said: str) -> None:
    try:
        OmegaConf.update(root, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, AssertionError, IndexError, TypeError, ValueError) as error:
        why = _wrong_list(root, key) or _why(error, said)
        raise ConfigError(f"override {_shown(said)!r} cannot be put into the config: {why}") from None


def _wrong_list(root: DictConfig, key: str) -> str:
    """Which list on the way of `key` is too short for it, or should be none; nothing where there is no such list."""
    node: Any = root
    parts = re.findall(r"[^.\[\]]+", key)
    for at, part in enumerate(parts):
        if isinstance(node, ListConfig) and not part.isdecimal():
            return f"{'.'.join(parts[:at])} is a list, and {part!r} is no index"
        if isinstance(node, ListConfig) and int(part) >= len(node):
            there = f"{counted(len(node), 'entry', 'entries')}" + (f", from 0 to {len(node) - 1}" if node[1:] else "")
            return f"{'.'.join(parts[:at])} has {there}"
        node = _select(root, ".".join(parts[: at + 1]))
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]

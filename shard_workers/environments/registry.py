"""Which environments there are, by name, and third parties' ones by import path.

Promises an instance that has every method of the contract, or a `ConfigError` that lists what could have
been said.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ...broker.errors import ConfigError
from .base import Environment
from .import_path import NotImportableError, import_object, is_import_path, search_first

KEY = "rolloutbus.environment"
BUILT_IN = {
    "actor_class": ("actor_class", "ActorClassEnvironment"),
    "functions": ("functions", "FunctionsEnvironment"),
    "nemo_gym": ("nemo_gym", "NemoGymEnvironment"),
}
_CONTRACT = ("start", "list_entries", "run_rollouts", "health", "stop")


def load_environment(name: str) -> Environment:
    """Make the environment called `name`, or the class at `package.module:Class`; it is not started yet."""
    try:
        return _class_of(name)()
    except TypeError as error:
        raise _needs_arguments(name, error) from error


def require_environment(name: str) -> None:
    """Raise what `load_environment` would, `NotImportableError` for a module that is not here; nothing is made."""
    made = _class_of(name)
    try:
        signature = inspect.signature(made)
    except ValueError:
        # Builtins and classes of C extensions may have none; whether they can be made is seen when they are.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise _needs_arguments(name, error) from error


def _class_of(name: str) -> Callable[[], Environment]:
    """The class called `name`, with every method of the contract."""
    if name in BUILT_IN:
        return _checked(_built_in_class(name), name)
    if not is_import_path(name):
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"{KEY}: {name!r} is not known; say one of {known}, or 'package.module:Class' for your own")
    # A console script, unlike `python -m`, does not search the folder that it was started in.
    search_first([Path.cwd()])
    return _checked(import_object(name, KEY), name)


def _built_in_class(name: str) -> Any:
    module_name, class_name = BUILT_IN[name]
    full_name = f"{__package__}.{module_name}"
    try:
        return getattr(importlib.import_module(full_name), class_name)
    except ModuleNotFoundError as error:
        if error.name == full_name:
            raise ConfigError(
                f"{KEY}: {name!r} is reserved and this version of rolloutbus does not ship it; "
                f"use 'functions' or 'package.module:Class'"
            ) from None
        raise NotImportableError(f"{KEY}: {name!r} needs the package {error.name!r}, which is not installed") from None


def _checked(candidate: Any, name: str) -> Callable[[], Environment]:
    if not isinstance(candidate, type):
        raise ConfigError(f"{KEY}: {name} is no class but {type(candidate).__name__}; name the environment's class")
    missing = [method for method in _CONTRACT if not callable(getattr(candidate, method, None))]
    if missing:
        raise ConfigError(f"{KEY}: class {name} lacks {', '.join(missing)}, which an environment must have")
    return cast(Callable[[], Environment], candidate)


def _needs_arguments(name: str, error: TypeError) -> ConfigError:
    return ConfigError(
        f"{KEY}: class {name} cannot be made without arguments ({error}); take settings in start(config)"
    )

"""Turns `module:attribute` from a config file into the Python object it names.

Promises one `ConfigError` that tells which key asked, what could not be imported and where it was looked
for, whatever goes wrong while importing somebody else's code.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from ...broker.errors import ConfigError
from .exits import text_of

_INSTALLED = {"site-packages", "dist-packages"}


class NotImportableError(ConfigError):
    """A module is not here, or cannot be imported here; on another machine it may be."""


def search_first(folders: Sequence[Path]) -> None:
    """Put folders before all that was installed in `sys.path`, in this order, and leave them there for imports made
    later. The standard library comes before them: a `queue.py` beside an environment must not stand for its own.
    """
    wanted = [str(folder) for folder in folders]
    others = [known for known in sys.path if known not in wanted]
    at = next((at for at, known in enumerate(others) if _INSTALLED & {*Path(known).parts}), len(others))
    sys.path[:] = [*others[:at], *wanted, *others[at:]]
    importlib.invalidate_caches()


def import_object(spec: object, key: str) -> Any:
    """Import what `spec` names as `module:attribute` (dots allowed on both sides); `key` is where the
    config says so.
    """
    module_name, attribute = _split(spec, key)
    module = _import_module(module_name, f"{key}: {spec}")
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError:
        origin = getattr(module, "__file__", None) or "a namespace package"
        raise ConfigError(
            f"{key}: {spec}: module {module_name!r} ({origin}) has no attribute {attribute!r}; "
            f"correct the name, or the search path if another module of that name was meant"
        ) from None


def is_import_path(spec: str) -> bool:
    """Whether it has the form `package.module:name`."""
    module_name, colon, attribute = spec.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")])


def _split(spec: object, key: str) -> tuple[str, str]:
    if not isinstance(spec, str) or not is_import_path(spec):
        raise ConfigError(f"{key}: {spec!r} is not of the form 'package.module:name'")
    module_name, _, attribute = spec.partition(":")
    return module_name, attribute


def _import_module(module_name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing dependency of the module must not read as if the module itself were missing.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken_module(module_name, where, error) from error
        raise NotImportableError(
            f"{where}: there is no module {error.name!r}; looked in {Path.cwd()} and the rest of the import "
            f"path. Start from the folder that holds it, install it, or list its folder, relative to the main config, "
            f"under `python_path` in the config file of that entry"
        ) from None
    # A script without a main guard ends its importer, which would take the whole worker down.
    except (Exception, SystemExit) as error:
        raise _broken_module(module_name, where, error) from error


def _broken_module(module_name: str, where: str, error: BaseException) -> NotImportableError:
    return NotImportableError(
        f"{where}: importing module {module_name!r} failed with {type(error).__name__}: {text_of(error)}; "
        f"`python -c 'import {module_name}'` shows the same"
    )

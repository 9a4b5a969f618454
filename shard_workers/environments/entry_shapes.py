"""Which environment an entry of a config was written for, as far as its shape tells.

A functions entry names its function at its top; one of NeMo Gym holds a server type there, or inherits it from another
entry. Neither means anything to the other environment, which would pass over it in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from .import_path import is_import_path

GYM_SERVER_TYPES: Final = ("responses_api_agents", "responses_api_models", "resources_servers", "environment_servers")
# With these an entry takes what it is from another one.
_GYM_REFERENCES: Final = ("_inherit_from", "_copy")
# Where NeMo Gym's own config files stand, below its package.
_GYM_FOLDERS: Final = (*GYM_SERVER_TYPES, "environments", "benchmarks")


def names_function(entry: object) -> bool:
    """Whether this is an entry with `function: package.module:callable`."""
    named = cast("Mapping[str, Any]", entry).get("function") if isinstance(entry, Mapping) else None
    return isinstance(named, str) and is_import_path(named)


def is_of_gym(entry: object) -> bool:
    """Whether this is an entry that NeMo Gym would start, or could."""
    return isinstance(entry, Mapping) and any(key in entry for key in (*GYM_SERVER_TYPES, *_GYM_REFERENCES))


def is_file_of_gym(path: str) -> bool:
    """Whether a path of `config_paths` reads like one of the files that NeMo Gym brings."""
    return path.partition("/")[0] in _GYM_FOLDERS

"""How the plan's messages show keys, values and choices, so that all of them read alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..broker.settings import quoted
from .plan_errors import ShardConfigError
from .plan_spec import CONFIG_ROOT

# Enough to recognise a value by; a whole entry in a message would bury what is said about it.
_MAX_SHOWN = 80


def shown(value: object) -> str:
    """The value as a config's author knows it, cut to a readable length."""
    if value is None:
        return "null"
    text = quoted(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def names(values: Iterable[str]) -> str:
    """Sorted and quoted: `'a', 'b'`; `(none)` if there are none."""
    return ", ".join(repr(value) for value in sorted(values)) or "(none)"


def key_path(path: str = "", shard: object = None) -> str:
    """The full path in backticks, with the shard's name behind it where that is known."""
    full = f"`{CONFIG_ROOT}.{path}`" if path else f"`{CONFIG_ROOT}`"
    return f"{full} (shard {shard!r})" if isinstance(shard, str) and shard else full


def config_error(problems: Sequence[str]) -> ShardConfigError:
    """One error that says all of the problems."""
    if len(problems) == 1:
        return ShardConfigError(problems[0])
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return ShardConfigError(f"{key_path()} has {len(problems)} mistakes:{listed}")


def raise_problems(problems: Sequence[str]) -> None:
    """Raise `config_error(problems)` if there are any."""
    if problems:
        raise config_error(problems)

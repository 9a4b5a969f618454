"""What a caller gave, looked at before anything begins: each refusal names the argument and says what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, cast, get_args

from ..broker.errors import ConfigError, UnknownBatchError
from ..broker.keys import NAME_PATTERN
from ..broker.settings import BrokerSettings, settings_from
from .batch import OnFailure


def broker_settings(url: str, settings: object) -> BrokerSettings:
    """The settings of the broker at `url`, a copy of what was given."""
    if isinstance(settings, BrokerSettings):
        given = settings.model_dump()
    elif settings is None or isinstance(settings, Mapping):
        given = dict(cast("Mapping[str, Any]", settings or {}))
    else:
        # Not the value: it may be an address with its password.
        raise ConfigError(f"settings must be a BrokerSettings or a mapping, but is a {type(settings).__name__}")
    return settings_from(BrokerSettings, {**given, "url": url}, "rolloutbus.broker")


def check_seconds(name: str, value: object) -> None:
    """Refuse what is no time to wait; NaN too, which would never be over."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ConfigError(f"{name} must be a number of seconds, 0 or more, but is {value!r}")


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a str, but is {value!r}")


def check_on_failure(value: object) -> None:
    """Refuse a misspelt one before anything is published: taken for "yield" it would hide failures."""
    known = get_args(OnFailure)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"on_failure must be {' or '.join(map(repr, known))}, but is {value!r}")


def check_batch_id(value: object) -> None:
    """`ConfigError` for what is no text, `UnknownBatchError` for a text that cannot be an id."""
    check_text("batch_id", value)
    if not NAME_PATTERN.fullmatch(cast(str, value)):
        raise UnknownBatchError(
            f"batch_id {value!r} is no batch's id; give what `batch.id` or `rolloutbus status` said"
        )

"""What can be set about the broker: where it is, how long things may take, how much may wait.

Times are seconds, sizes bytes. The models refuse unknown keys; `settings_from` turns what pydantic finds into our own
words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ConfigError
from .wording import did_you_mean

Model = TypeVar("Model", bound=BaseModel)

MEBIBYTE = 1 << 20
# Ten years. Infinity would be no JSON, and times far beyond are no expiry that a server takes.
LONGEST_S: Final = 10 * 365 * 86400
Seconds: TypeAlias = Annotated[float, Field(le=LONGEST_S, allow_inf_nan=False)]


class BrokerSettings(BaseModel):
    """Connection, leases and bounds. The defaults suit rollouts of seconds to an hour."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    connect_timeout_s: Seconds = Field(default=5.0, gt=0)
    command_timeout_s: Seconds = Field(default=15.0, gt=0)
    # Long enough for a broker's restart with a large append-only file, short enough that nobody sleeps through it.
    reconnect_timeout_s: Seconds = Field(default=300.0, gt=0)
    block_s: Seconds = Field(default=5.0, gt=0)
    lease_s: Seconds = Field(default=30.0, gt=0)
    renew_every_s: Seconds = Field(default=1.0, gt=0)
    abandon_after_s: Seconds = Field(default=600.0, gt=0)
    no_instance_timeout_s: Seconds = Field(default=600.0, gt=0)
    # Must outlive every absence after which work still goes on: abandon_after_s and a night's partition.
    key_ttl_s: Seconds = Field(default=7200.0, gt=0)
    # The protocol's own limit on one value is 512 MiB; half of it leaves room for the rest of the entry.
    max_payload_bytes: int = Field(default=256 * MEBIBYTE, gt=0)
    max_queued_bytes: int = Field(default=256 * MEBIBYTE, gt=0)
    max_unread_bytes: int = Field(default=256 * MEBIBYTE, gt=0)
    max_dead_bytes: int = Field(default=256 * MEBIBYTE, gt=0)
    memory_high_ratio: float = Field(default=0.7, gt=0, le=1)
    stall_warning_s: Seconds = Field(default=60.0, gt=0)
    sweep_every_s: Seconds = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.renew_every_s >= self.lease_s:
            raise ValueError(
                f"renew_every_s ({self.renew_every_s:g}) must be shorter than lease_s ({self.lease_s:g}), "
                "or every lease runs out"
            )
        if self.abandon_after_s >= self.key_ttl_s:
            raise ValueError(
                f"key_ttl_s ({self.key_ttl_s:g}) must be longer than abandon_after_s ({self.abandon_after_s:g}), "
                "or work expires that nobody has given up"
            )
        return self

    @property
    def lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    @property
    def abandon_ms(self) -> int:
        return int(self.abandon_after_s * 1000)

    @property
    def key_ttl_ms(self) -> int:
        return int(self.key_ttl_s * 1000)

    @property
    def instance_ttl_ms(self) -> int:
        """An instance counts as gone after missing several signs of life, never later than its leases end."""
        return int(min(self.lease_s, max(5 * self.renew_every_s, self.lease_s / 3)) * 1000)


def settings_from(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Build `model` from `values`; a `ConfigError` lists every wrong key with its full path below `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, model, where) for item in error.errors())) from None


def _explain(item: Any, model: type[BaseModel], where: str) -> str:
    path = ".".join([where, *(str(part) for part in item["loc"])])
    if item["type"] == "extra_forbidden":
        known = sorted(_known(model, item["loc"]))
        return f"{path} is not a known key{did_you_mean(str(item['loc'][-1]), known)}; known here: {', '.join(known)}"
    if item["type"] == "value_error":
        return f"{path}: {item['ctx']['error']}"
    # A secret must not reach a log because its neighbour was mistyped, nor as part of a whole that has the wrong type.
    secret = not item["loc"] or names_secret(path)
    return f"{path}: {item['msg'].lower()}" + ("" if secret else f", but is {quoted(item['input'])}")


def _known(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ["(see the documentation)"]
        model = annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def broker_url(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The broker's address: the one given, else `REDIS_URL`, else None (the caller then starts an embedded broker)."""
    return given or environ.get("REDIS_URL") or None


def names_secret(key: str) -> bool:
    """Whether what stands at the dotted `key` may be a secret, or hold one, and is not to be shown."""
    return any(word in key.rsplit(".", 1)[-1].lower() for word in ("key", "password", "secret", "url"))


def quoted(value: object) -> str:
    """`value` for a message: an address may stand where another setting should."""
    text = repr(value)
    return redacted(text) if "://" in text else text


def redacted(url: str) -> str:
    """`url` without its password, for messages and logs; also where it is no valid address.

    A user that stands alone is hidden too: it may be a password in the wrong place.
    """
    masked = re.sub(r"([?&]password=)[^&#]*", r"\1***", url)
    # The path of a socket may hold an @.
    if masked.lstrip().startswith("unix:///"):
        return masked
    return re.sub(r"^(.*?://)?([^:@/]*:)?.*@", r"\1\2***@", masked, count=1, flags=re.DOTALL)

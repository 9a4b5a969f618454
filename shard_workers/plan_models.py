"""What each key of the plan may hold: pydantic models that say in our words what is wrong, and where.

`read_settings` is the way in. It promises that a mistake becomes a `ShardConfigError` with the full key path,
that all mistakes of one reading are told at once, and that null counts as absent everywhere, because an
override can blank an inherited key but not delete it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from ..broker.wording import did_you_mean
from .gym_config import GymConfig
from .plan_spec import (
    DEFAULT_PLACEMENT_STRATEGY,
    DEFAULT_REPLICAS,
    PLACEMENT_STRATEGIES,
    SHARD_NAME_PATTERN,
    SHARD_SPEC_KEYS,
    SHARDING_CONFIG_KEYS,
)
from .plan_text import config_error, key_path, names, shown

_OURS = "rolloutbus"
# The upper end is not part of a range, so it is one above the last port there is.
_MAX_PORT_BOUND = 65_536


def _fail(text: str, at: str = "") -> NoReturn:
    """Refuse the value; `at` points inside it, such as `[2]`."""
    # The text goes in as a value, since pydantic would read braces in it as fields of its template.
    raise PydanticCustomError(_OURS, "{text}", {"text": text, "at": at})


def _is_blank(value: object) -> bool:
    return not (isinstance(value, str) and value.strip())


def _check_name(value: object) -> str:
    if not isinstance(value, str):
        _fail(f"must be a string, but is {shown(value)}; put it in quotes")
    if not SHARD_NAME_PATTERN.match(value):
        _fail(
            "must be letters, digits, '.', '_' and '-', beginning with a letter or digit, because it names "
            f"a log folder; it is {shown(value)}"
        )
    return value


def _check_strings(value: object, what: str) -> list[str]:
    if not isinstance(value, list):
        hint = "; write it as a list: [...]" if isinstance(value, str) else ""
        _fail(f"must be a list of {what}, but is {shown(value)}{hint}")
    items = cast("list[object]", value)
    for index, item in enumerate(items):
        if _is_blank(item):
            _fail(f"must be a non-empty string, but is {shown(item)}", at=f"[{index}]")
    return cast("list[str]", items)


def _check_config_paths(value: object) -> list[str]:
    paths = _check_strings(value, "Gym config files")
    if not paths:
        _fail("is empty; name at least one Gym config file that this shard loads")
    return paths


def _check_keys(value: object) -> list[str]:
    keys = _check_strings(value, "entry names")
    for index, key in enumerate(keys):
        if key in keys[:index]:
            _fail(f"names {key!r} a second time; once is enough", at=f"[{index}]")
    return keys


def _check_overrides(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _fail(f"must be a mapping that is merged over the Gym config, but is {shown(value)}")
    overrides = cast("Mapping[object, Any]", value)
    for key, item in overrides.items():
        if not isinstance(key, str):
            _fail(f"has the key {shown(key)}; its keys must be strings: quote it")
        # Null blanks a key of the base; it carries nothing that could reach Gym.
        if item is None:
            continue
        if key == "config_paths":
            _fail("cannot hold `config_paths`; set the shard's own `config_paths` instead", at=".config_paths")
        if key in SHARDING_CONFIG_KEYS:
            _fail(f"belongs to the plan and never reaches Gym; move it up to {key_path(key)}", at=f".{key}")
    return cast("dict[str, Any]", dict(overrides))


def _check_replicas(value: object) -> int:
    # YAML's `yes` is True, and Python's True is an int.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _fail(f"must be an integer >= 1, but is {shown(value)}")
    return value


def _check_cpus(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(f"must be a number of CPUs above 0, but is {shown(value)}; remove it for the default")
    try:
        cpus = float(value)
    except OverflowError:  # an integer beyond what a float can hold
        cpus = math.inf
    if not (cpus > 0 and math.isfinite(cpus)):
        _fail(f"must be a finite number of CPUs above 0, but is {shown(value)}; remove it for the default")
    return cpus


def _check_port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_PORT_BOUND:
        _fail(f"must be an integer from 1 to {_MAX_PORT_BOUND}, but is {shown(value)}")
    return value


def _check_strategy(value: object) -> str:
    if not isinstance(value, str) or value not in PLACEMENT_STRATEGIES:
        known = did_you_mean(value.upper(), PLACEMENT_STRATEGIES) if isinstance(value, str) else ""
        _fail(f"must be one of {', '.join(PLACEMENT_STRATEGIES)}, but is {shown(value)}{known}")
    return value


def _check_shards(value: object) -> list[object]:
    if isinstance(value, list) and value:
        return cast("list[object]", value)
    said = "is empty" if value == [] else f"is {shown(cast(object, value))}"
    _fail(
        "must be a list of at least one shard, each with `name` and `config_paths`, but "
        f"{said}; for an unsharded run delete the key itself"
    )


def _refuse_shared_paths(value: object) -> NoReturn:
    _fail(
        f"stands beside `shards`, and nothing says which shard {shown(value)} belongs to; move each path "
        "into the `config_paths` of its shard (or of several), and set this key to null"
    )


def _without_nulls(data: object) -> object:
    """Null counts as absent."""
    if not isinstance(data, Mapping):
        _fail(f"must be a mapping with at least `name` and `config_paths`, but is {shown(data)}")
    return {key: value for key, value in cast("Mapping[Any, Any]", data).items() if value is not None}


KeyList = Annotated[list[str], BeforeValidator(_check_keys)]
Overrides = Annotated[dict[str, Any], BeforeValidator(_check_overrides)]
Port = Annotated[int, BeforeValidator(_check_port)]


class ShardSettings(BaseModel):
    """One item of `shards`, as written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, BeforeValidator(_check_name)]
    config_paths: Annotated[list[str], BeforeValidator(_check_config_paths)]
    inherited_overlays: KeyList = []
    overrides: Overrides = {}
    replicas: Annotated[int, BeforeValidator(_check_replicas)] = DEFAULT_REPLICAS
    actor_cpus: Annotated[float, BeforeValidator(_check_cpus)] | None = None
    port_range_low: Port | None = None
    port_range_high: Port | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        return _without_nulls(data)

    @model_validator(mode="after")
    def _check_port_range(self) -> ShardSettings:
        low, high = self.port_range_low, self.port_range_high
        if (low is None) != (high is None):
            there, lacking = ("low", "high") if high is None else ("high", "low")
            _fail(f"has port_range_{there} but no port_range_{lacking}; give both, or neither")
        if low is not None and high is not None and low >= high:
            _fail(
                f"has port_range_low {low} and port_range_high {high}; low must be below high, which is itself not used"
            )
        return self


class PlanSettings(BaseModel):
    """The sharding keys of `env.nemo_gym`, as written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: Annotated[list[ShardSettings], BeforeValidator(_check_shards)]
    common_inherited_overlays: KeyList = []
    common_overrides: Overrides = {}
    allowed_duplicate_entries: KeyList = []
    placement_strategy: Annotated[str, BeforeValidator(_check_strategy)] = DEFAULT_PLACEMENT_STRATEGY
    config_paths: Annotated[None, BeforeValidator(_refuse_shared_paths)] = None

    @model_validator(mode="after")
    def _refuse_repeated_names(self) -> PlanSettings:
        first_use: dict[str, int] = {}
        for index, shard in enumerate(self.shards):
            first = first_use.setdefault(shard.name, index)
            if first != index:
                _fail(
                    f"is {shard.name!r}, as is shards[{first}]; give each shard its own name",
                    at=f"shards[{index}].name",
                )
        return self


def read_settings(config: GymConfig) -> PlanSettings:
    """Read and check the sharding keys; the `ShardConfigError` it raises tells every mistake found."""
    wanted = SHARDING_CONFIG_KEYS | {"config_paths"}
    raw = {key: config.read(key) for key in config.keys if key in wanted}
    # `shards` stays even when null: who blanks it may believe in an unsharded run, with the other keys still there.
    raw = {key: value for key, value in raw.items() if value is not None or key == "shards"}
    try:
        return PlanSettings.model_validate(raw)
    except ValidationError as error:
        # `from None`, because pydantic's own report would bury ours.
        raise config_error([_told(details, raw) for details in error.errors(include_url=False)]) from None


def _told(details: ErrorDetails, raw: Mapping[str, Any]) -> str:
    """One pydantic error as one sentence that begins with the key path."""
    place = details["loc"]
    path = _joined(place) + str(details.get("ctx", {}).get("at", ""))
    shard = _shard_name(place, raw)
    key = str(place[-1]) if place else ""
    if details["type"] == "missing":
        return f"{key_path(path, shard)} is missing; every shard needs it"
    if details["type"] in {"extra_forbidden", "invalid_key"}:
        return (
            f"{key_path(path, shard)} is no setting of a shard{did_you_mean(key, SHARD_SPEC_KEYS)}; a shard "
            f"may have {names(SHARD_SPEC_KEYS)}, and what is meant for Gym belongs under its `overrides`"
        )
    return f"{key_path(path, shard)} {details['msg']}"


def _joined(place: tuple[int | str, ...]) -> str:
    path = ""
    for step in place:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")


def _shard_name(place: tuple[int | str, ...], raw: Mapping[str, Any]) -> object:
    """The name that the shard at this place goes by, if it has a usable one."""
    if len(place) < 2 or place[0] != "shards" or not isinstance(place[1], int):
        return None
    shard: object = raw["shards"][place[1]]
    return cast("Mapping[str, object]", shard).get("name") if isinstance(shard, Mapping) else None

"""The configuration of a fleet: one YAML, of which `rolloutbus` and `env.nemo_gym` are read here. No Ray in it.

Promises: everything that can be wrong before a process starts is a `ConfigError` with the full key path, unknown keys
included; the config that is read is never changed; what an instance is started with holds plain values only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field

from ..broker.errors import ConfigError
from ..broker.keys import UNSHARDED_SHARD, Keys
from ..broker.settings import BrokerSettings, Seconds, broker_url, settings_from
from ..broker.wording import did_you_mean
from .gym_config import GymConfig, find_gym_config_entries
from .overlay import apply_shard_log_dir, apply_shard_overlay
from .plan import parse_shard_plan
from .plan_errors import ShardConfigError
from .plan_ports import MIN_PORTS_PER_REPLICA, replica_port_range
from .plan_spec import CONFIG_ROOT, DEFAULT_PLACEMENT_STRATEGY, ShardPlan, ShardSpec
from .plan_text import names, shown
from .worker_settings import WorkerSettings
from .yaml_files import load_yaml

ROOT: Final = "rolloutbus"
CONFIG_DIR_KEY: Final = "config_dir"
BASE_URL_KEY: Final = "policy_base_url"
MODEL_NAME_KEY: Final = "policy_model_name"

# They run in the instance's own process, so that no port of a range would ever be listened on.
_OPEN_NO_PORTS: Final = frozenset({"functions"})

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


class FleetSettings(BaseModel):
    """`rolloutbus.fleet`: how instances are placed, started, watched and stopped. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # An existing Ray cluster to join; none means the one this process is connected to, RAY_ADDRESS, or a local one.
    address: str | None = None
    actor_cpus: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    placement_timeout_s: Seconds = Field(default=180.0, gt=0)
    startup_timeout_s: Seconds = Field(default=1800.0, gt=0)
    stop_timeout_s: Seconds = Field(default=30.0, gt=0)
    # Per instance and hour; one more and it is given up. A group that ends its instances costs `infra_attempts`.
    max_restarts: int = Field(default=20, ge=0)
    restart_backoff_s: Seconds = Field(default=1.0, ge=0)
    restart_backoff_max_s: Seconds = Field(default=60.0, ge=0)
    health_timeout_s: Seconds = Field(default=30.0, gt=0)
    health_failures: int = Field(default=3, ge=1)
    # An environment may keep its event loop busy for long (a verifier in pure Python); only beyond this it counts as
    # stuck.
    blocked_timeout_s: Seconds = Field(default=600.0, gt=0)
    # Where stacks share nodes: what is left of a shard's range is room for replicas that are added later.
    ports_per_replica: int = Field(default=50, ge=MIN_PORTS_PER_REPLICA)


class _Section(BaseModel):
    """`rolloutbus`, but `workers`, whose defaults and overrides are merged by hand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = "default"
    environment: str = "nemo_gym"
    broker: BrokerSettings = BrokerSettings()
    fleet: FleetSettings = FleetSettings()
    workers: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class FleetConfig:
    """A fleet to be, checked. `plan` holds one shard `nemo_gym` where the config is not sharded."""

    run: str
    environment: str
    broker: BrokerSettings
    fleet: FleetSettings
    plan: ShardPlan
    sharded: bool
    workers: Mapping[str, WorkerSettings]
    gym: Mapping[str, Any]
    config_dir: str

    def shard(self, name: str) -> ShardSpec:
        """The shard called `name`; a `ConfigError` lists those there are."""
        for spec in self.plan.shards:
            if spec.name == name:
                return spec
        shards = [spec.name for spec in self.plan.shards]
        raise ConfigError(
            f"there is no shard {name!r} in run {self.run!r}{did_you_mean(name, shards)}; there are {names(shards)}"
        )

    def actor_cpus(self, shard: ShardSpec) -> float:
        return self.fleet.actor_cpus if shard.actor_cpus is None else shard.actor_cpus

    @property
    def cpus(self) -> float:
        """Of all instances together."""
        return sum(self.actor_cpus(shard) * shard.replicas for shard in self.plan.shards)

    @property
    def one_node_each(self) -> bool:
        return self.plan.placement_strategy == DEFAULT_PLACEMENT_STRATEGY

    @property
    def hopeless_here(self) -> str | None:
        """Why a local Ray could never place it: that is one node for ever, so there is no use in waiting for others."""
        return self.hopeless_with(self.plan.total_instances)

    def hopeless_with(self, instances: int) -> str | None:
        """Why a local Ray could never place so many."""
        if instances == 1 or not self.one_node_each:
            return None
        return (
            f"{instances} instances under {self.plan.placement_strategy} need {instances} nodes, and a local Ray is "
            f"one; join a cluster with `{ROOT}.fleet.address`, or set `{CONFIG_ROOT}.placement_strategy: PACK`, which "
            "is for one machine"
        )

    @property
    def opens_ports(self) -> bool:
        """Whether its stacks listen on ports, so that ranges mean anything."""
        return self.environment not in _OPEN_NO_PORTS

    def port_slots(self, shard: ShardSpec) -> int:
        """Into how many slices the shard's port range is cut; more than `replicas` where it has room for more."""
        if shard.port_range_low is None or shard.port_range_high is None:
            return shard.replicas
        return max(shard.replicas, (shard.port_range_high - shard.port_range_low) // self.fleet.ports_per_replica)

    def port_range(self, shard: ShardSpec, slot: int) -> tuple[int, int] | None:
        """The half-open port range of the instance in `slot`; no two slots share a port. None where there is none.

        Past the last slice an instance with a node of its own gets the whole range; on a shared node it is refused.
        """
        if not self.opens_ports:
            return None
        slots = self.port_slots(shard)
        if slot < slots:
            return replica_port_range(dataclasses.replace(shard, replicas=slots), slot, self.plan.placement_strategy)
        if shard.port_range_low is None or shard.port_range_high is None:
            return None
        if self.one_node_each:
            return shard.port_range_low, shard.port_range_high
        raise ShardConfigError(
            f"shard {shard.name!r} has ports for {slots} replicas ({shard.port_range_low} to "
            f"{shard.port_range_high - 1}, {self.fleet.ports_per_replica} each) and all are in use; widen its port "
            f"range, or lower `{ROOT}.fleet.ports_per_replica`"
        )

    def instance_config(
        self,
        shard: ShardSpec,
        slot: int,
        *,
        replica_index: int | None = None,
        base_urls: Any = None,
        model_name: str | None = None,
    ) -> dict[str, Any]:
        """What one instance's environment is started with: its slice of the config, its ports, its log folder, the
        model.
        """
        merged = apply_shard_overlay(self.gym, self.plan, shard)
        merged = apply_shard_log_dir(merged, shard.name, replica_index=replica_index)
        ports = self.port_range(shard, slot)
        if ports is not None:
            merged |= {"port_range_low": ports[0], "port_range_high": ports[1]}
        if base_urls is not None:
            merged[BASE_URL_KEY] = base_urls
        if model_name is not None:
            merged[MODEL_NAME_KEY] = model_name
        merged.setdefault(CONFIG_DIR_KEY, self.config_dir)
        return merged


def cluster_address(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The Ray cluster to join: the one given, else `RAY_ADDRESS`, else None, which means a Ray on this machine."""
    return given or environ.get("RAY_ADDRESS") or None


def read_fleet_config(config: ConfigSource) -> FleetConfig:
    """Read a fleet's config from a mapping, an OmegaConf node, or the path of a YAML file.

    Raises `ConfigError` (`ShardConfigError` for what stands under `env.nemo_gym`), with the key path of what is wrong.
    """
    root, folder = _load(config)
    raw = _plain(root, ROOT)
    section = settings_from(_Section, {**raw, "broker": _with_url(raw.get("broker"))}, ROOT)
    Keys(section.run)
    gym = _gym_node(root)
    plan = parse_shard_plan(gym, opens_ports=section.environment not in _OPEN_NO_PORTS)
    sharded = plan is not None
    plan = plan or _unsharded_plan(gym)
    return FleetConfig(
        run=section.run,
        environment=section.environment,
        broker=section.broker,
        fleet=section.fleet,
        plan=plan,
        sharded=sharded,
        workers=_worker_settings(section.workers, [shard.name for shard in plan.shards]),
        gym=gym,
        config_dir=str(_select(root, CONFIG_DIR_KEY) or folder),
    )


def _load(config: object) -> tuple[DictConfig, Path]:
    if isinstance(config, str | os.PathLike):
        path = Path(os.fspath(cast("str | os.PathLike[str]", config)))
        return load_yaml(path, f"with `{ROOT}` and `{CONFIG_ROOT}`"), path.resolve().parent
    if isinstance(config, DictConfig):
        return config, Path.cwd()
    if not isinstance(config, Mapping):
        raise ConfigError(f"the config must be a mapping or the path of a YAML file, but is {shown(config)}")
    try:
        # Python objects may stand in an entry, for environments that take them.
        created = OmegaConf.create(dict(cast("Mapping[str, Any]", config)), flags={"allow_objects": True})
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config cannot be read: {str(error).partition(chr(10))[0]}") from None
    return created, Path.cwd()


def _plain(root: DictConfig, key: str) -> dict[str, Any]:
    value: object = _select(root, key)
    if value is None:
        return {}
    if not isinstance(value, DictConfig):
        raise ConfigError(f"{key} must be a mapping, but is {shown(value)}")
    try:
        plain = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or key}: {str(error).partition(chr(10))[0]}") from None
    return _without_nulls(cast("dict[str, Any]", plain))


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Null counts as absent, because an override can blank a key but not delete it."""
    return {
        key: _without_nulls(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def _select(root: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(root, key)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).partition(chr(10))[0]}") from None


def _with_url(broker: object) -> object:
    """The broker's section with `REDIS_URL` where it names no address; anything odd is left for the model to refuse."""
    if broker is not None and not isinstance(broker, dict):
        return broker
    given = dict(cast("dict[str, Any]", broker or {}))
    url = given.get("url")
    found = broker_url(url if isinstance(url, str) else None)
    return {**given, "url": found} if found and (url is None or isinstance(url, str)) else given


def _gym_node(root: DictConfig) -> Mapping[str, Any]:
    node: object = _select(root, CONFIG_ROOT)
    if node is None:
        raise ShardConfigError(
            f"`{CONFIG_ROOT}` is missing; it says what the environments are: entries, `config_paths`, or `shards`"
        )
    if not isinstance(node, DictConfig):
        raise ShardConfigError(f"`{CONFIG_ROOT}` must be a mapping, but is {shown(node)}")
    return cast("Mapping[str, Any]", node)


def _unsharded_plan(gym: Mapping[str, Any]) -> ShardPlan:
    """The one-shard, one-replica plan of a config without `shards`; its only shard takes everything."""
    config = GymConfig(gym)
    paths: object = config.read("config_paths") if "config_paths" in config.keys else None
    if paths is not None and not (
        isinstance(paths, list) and all(isinstance(path, str) and path for path in cast("list[object]", paths))
    ):
        raise ShardConfigError(
            f"`{CONFIG_ROOT}.config_paths` must be a list of Gym config files, but is {shown(cast(object, paths))}"
        )
    shard = ShardSpec(UNSHARDED_SHARD, cast("list[str]", paths or []), frozenset(find_gym_config_entries(gym)))
    return ShardPlan([shard], frozenset(), {}, frozenset(), "PACK")


def _worker_settings(values: dict[str, Any], shards: list[str]) -> dict[str, WorkerSettings]:
    where = f"{ROOT}.workers"
    defaults = {key: value for key, value in values.items() if key != "shards"}
    settings_from(WorkerSettings, defaults, where)
    overrides: object = values.get("shards") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(
            f"{where}.shards must be a mapping of shard names to worker settings, but is {shown(overrides)}"
        )
    result = dict.fromkeys(shards, WorkerSettings.model_validate(defaults))
    for name, own in cast("dict[str, object]", overrides).items():
        path = f"{where}.shards.{name}"
        if name not in result:
            raise ConfigError(f"{path}: there is no such shard{did_you_mean(name, shards)}; there are {names(shards)}")
        if not isinstance(own, dict):
            raise ConfigError(f"{path} must be a mapping of worker settings, but is {shown(own)}")
        result[name] = settings_from(WorkerSettings, {**defaults, **cast("dict[str, Any]", own)}, path)
    return result

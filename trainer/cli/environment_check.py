"""What can be told of a config's environment, and of the routes that it hosts, before anything is started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from ...broker.errors import ConfigError, RowError
from ...broker.keys import ANY_ROUTE
from ...producer import plan_groups
from ...shard_workers.yaml_files import load_yaml
from .console import say
from .rows import FileRows

if TYPE_CHECKING:
    from ...shard_workers.fleet_config import FleetConfig
    from ...shard_workers.plan_spec import ShardSpec

_FUNCTIONS, _NEMO_GYM = "functions", "nemo_gym"

Entries = dict[str, dict[str, list[str]]]


def check_environment(fleet: FleetConfig, *, starting: bool = False) -> None:
    """Raise `ConfigError` for a name that stands for no environment, and for entries that mean nothing to it.

    A module that is not here is no mistake where the fleet joins a cluster, whose nodes may have it: that is only said.
    So it is of NeMo Gym itself, and of a plan that a local Ray could never place, unless the fleet is `starting` here:
    a trainer may be connected to a cluster that the config does not name.
    """
    from ...shard_workers.environments.import_path import NotImportableError
    from ...shard_workers.environments.nemo_gym.environment import require_gym
    from ...shard_workers.environments.registry import require_environment
    from ...shard_workers.fleet_config import cluster_address

    _check_entries(fleet)
    address = cluster_address(fleet.fleet.address)
    if address is None and (why := fleet.hopeless_here) is not None:
        if starting:
            raise ConfigError(why)
        say(why, "yellow")
    try:
        require_environment(fleet.environment)
        if fleet.environment == _NEMO_GYM:
            require_gym()
    except NotImportableError as error:
        if address is None and (starting or fleet.environment != _NEMO_GYM):
            raise
        where = f"the nodes of the cluster {address}" if address else "the machine that starts it"
        say(f"not checked, {where} must have it: {error}", "yellow")


def _check_entries(fleet: FleetConfig) -> None:
    """Who forgets `environment: functions` has NeMo Gym, which passes over entries that name functions.

    A shard that has nothing else is refused. Where Gym's entries stand beside them, or may stand in a file that is not
    here, that is only said. Other environments may read what they like.
    """
    from ...shard_workers.environments.entry_shapes import is_of_gym, names_function

    if fleet.environment != _NEMO_GYM:
        return
    for shard in fleet.plan.shards:
        layers, complete = _layers(fleet, shard)
        entries = [(name, entry) for layer in layers for name, entry in layer.items()]
        functions = dict.fromkeys(name for name, entry in entries if names_function(entry))
        if not functions:
            continue
        names = f"{', '.join(functions)} {'name functions' if len(functions) > 1 else 'names a function'}"
        told = f"shard {shard.name!r}: {names}, and environment {_NEMO_GYM}, which is the default, runs none"
        if complete and not any(is_of_gym(entry) for _, entry in entries):
            raise ConfigError(f"{told}; say `rolloutbus.environment: {_FUNCTIONS}` in the config")
        say(f"{told}; it needs a config of its own, with `rolloutbus.environment: {_FUNCTIONS}`", "yellow")


def _layers(fleet: FleetConfig, shard: ShardSpec) -> tuple[list[Mapping[str, Any]], bool]:
    """What a shard's entries come from, as far as it is here, and whether that is all of it."""
    from ...shard_workers.environments.config_files import places_of

    layers: list[Mapping[str, Any]] = [fleet.instance_config(shard, 0)]
    for path in shard.config_paths:
        place = next((place for place in places_of(path, fleet.config_dir) if place.is_file()), None)
        try:
            found = load_yaml(place, "of entries") if place else None
        except ConfigError:
            # Whoever starts the stack says what is wrong with it.
            found = None
        if found is not None:
            layers.append(cast("dict[str, Any]", OmegaConf.to_container(found, resolve=False)))
    return layers, len(layers) == 1 + len(shard.config_paths)


def check_before_start(fleet: FleetConfig) -> Mapping[str, str] | None:
    """All that a command which starts a fleet can know: its environment, files and functions; gives where rows may go.

    None where that is not known: environments that start servers to tell, and functions that a cluster's nodes have.
    """
    from ...shard_workers.fleet_config import cluster_address

    check_environment(fleet, starting=True)
    hosted = None if cluster_address(fleet.fleet.address) else entries_of_functions(fleet)
    return None if hosted is None else hosted_routes(fleet, hosted)


def config_files(fleet: FleetConfig) -> list[Path]:
    """Where the files that its shards name are looked for; not every place has one."""
    from ...shard_workers.environments.config_files import places_of

    paths = [path for shard in fleet.plan.shards for path in shard.config_paths]
    return [place for path in paths for place in places_of(path, fleet.config_dir)]


def entries_of_functions(fleet: FleetConfig) -> Entries | None:
    """What each shard's functions environment hosts; None for environments that would start servers to tell."""
    if fleet.environment != _FUNCTIONS:
        return None
    return asyncio.run(_ask_functions(fleet))


async def _ask_functions(fleet: FleetConfig) -> Entries:
    from ...shard_workers.environments import load_environment

    hosted: Entries = {}
    for shard in fleet.plan.shards:
        environment = load_environment(fleet.environment)
        try:
            await environment.start(fleet.instance_config(shard, 0))
            hosted[shard.name] = environment.list_entries()
        except ConfigError as error:
            raise ConfigError(f"shard {shard.name!r}: {error}") from None
        finally:
            await environment.stop()
    return hosted


def route_map(fleet: FleetConfig, hosted: Entries | None) -> Mapping[str, str] | None:
    """Route → shard as a fleet would publish it; None where that is not known yet."""
    from ...shard_workers import ShardSetupError, build_route_shard_map

    if not fleet.sharded:
        return {ANY_ROUTE: fleet.plan.shards[0].name}
    if hosted is None:
        return None
    try:
        return build_route_shard_map(hosted, fleet.plan.allowed_duplicate_entries)
    except ShardSetupError as error:
        raise ConfigError(str(error)) from None


def hosted_routes(fleet: FleetConfig, hosted: Entries | None) -> Mapping[str, str] | None:
    """Where rows may go: as `route_map`, but an unsharded shard of functions hosts its entries and nothing else."""
    from ...shard_workers import build_route_shard_map

    if fleet.sharded or hosted is None or fleet.environment != _FUNCTIONS:
        return route_map(fleet, hosted)
    return build_route_shard_map(hosted)


def check_routes(found: FileRows, routes: Mapping[str, str] | None, num_generations: int = 1) -> None:
    """Raise `RowError` for rows without a route, groups that mix routes, and routes that nobody hosts.

    The last only where it is known what is hosted; the others would be found once the fleet is up, half an hour later.
    """
    from ...shard_workers import ShardSetupError, validate_dataset_routes

    with found.told_by_line():
        plan_groups(found.rows, {ANY_ROUTE: ANY_ROUTE}, num_generations)
        try:
            validate_dataset_routes(routes, {found.name: found.rows})
        except ShardSetupError as error:
            raise RowError(str(error)) from None

"""`check`: everything about a config, and rows for it, that can be known without starting servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from omegaconf import OmegaConf
from rich.markup import escape
from rich.table import Table

from ...broker.errors import ConfigError
from ...broker.shard_records import instance_labels
from ...broker.wording import counted
from ...producer import check_rows
from ...shard_workers.plan_spec import GYM_LOG_DIR_KEY
from ...shard_workers.yaml_files import load_yaml
from .config import ROOTS, ConfigPath, Overrides, load_config, with_address
from .console import add_row, new_table, out, print_json, say, show_table
from .environment_check import Entries, check_environment, check_routes, entries_of_functions, hosted_routes, route_map
from .fleet_commands import Address
from .rows import read_rows
from .targets import AsJson

if TYPE_CHECKING:
    from ...shard_workers.fleet_config import FleetConfig
    from ...shard_workers.plan_spec import ShardSpec

_ENTRIES_SHAPE = "{shard: {entry: [server types]}}"

RowsOption = Annotated[
    str | None,
    typer.Option(
        "--rows", "-r", metavar="R", help="JSONL whose routes are checked; - reads standard input.", show_default=False
    ),
]
EntriesOption = Annotated[
    Path | None,
    typer.Option(
        "--entries", metavar="F", show_default=False,
        # A help text is markup, which would swallow the brackets.
        help=f"JSON or YAML of what the shards host, {escape(_ENTRIES_SHAPE)}, as running stacks report it.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class PlannedInstance:
    """Where one instance will listen and log."""

    label: str
    ports: str
    log_dir: str


@dataclass(frozen=True)
class PlannedShard:
    """One line of the plan; `routes` is None where they are not known yet."""

    shard: str
    replicas: int
    slots: int
    cpus: float
    config_paths: list[str]
    entries: list[str]
    routes: list[str] | None
    instances: list[PlannedInstance]


def check(
    config: ConfigPath,
    overrides: Overrides = None,
    rows: RowsOption = None,
    entries: EntriesOption = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Check a config and print its plan; with --rows, whether every row's route is hosted.

    Nothing is started. Which routes a shard hosts is known from the config for `functions` environments, whose
    functions are imported for it; for others give --entries. An environment class that cannot be imported here is a
    mistake, unless the fleet joins a Ray cluster (--address, rolloutbus.fleet.address), whose nodes may have it. NeMo
    Gym need not be here, nor the nodes that a plan needs: that is only said.

    Example: rolloutbus check --config examples/quickstart.yaml --rows examples/rows.jsonl
    """
    from ...shard_workers.fleet_config import read_fleet_config

    root = load_config(config, overrides)
    fleet = read_fleet_config(with_address(root, address))
    if ROOTS[0] not in root:
        say(f"{config} has no `{ROOTS[0]}`: run {fleet.run!r}, environment {fleet.environment}, defaults everywhere")
    check_environment(fleet)
    hosted = _read_entries(entries, fleet) if entries is not None else entries_of_functions(fleet)
    routes = route_map(fleet, hosted)
    shards = [_planned(fleet, shard.name, routes) for shard in fleet.plan.shards]
    verdict = _check_rows(rows, hosted_routes(fleet, hosted))
    if as_json:
        print_json(_as_plain(fleet, shards, verdict))
        return
    _show(fleet, shards)
    out.print(verdict)


def _read_entries(path: Path, fleet: FleetConfig) -> Entries:
    """What `--entries` says, checked as far as it is ours."""
    said = OmegaConf.to_container(load_yaml(path, _ENTRIES_SHAPE, key="--entries"), resolve=False)
    if not all(isinstance(value, dict) for value in cast("dict[str, Any]", said).values()):
        raise ConfigError(f"{path} must map each shard to its entries: {_ENTRIES_SHAPE}")
    hosted = cast(Entries, said)
    for shard in hosted:
        fleet.shard(shard)
    missing = [shard.name for shard in fleet.plan.shards if shard.name not in hosted]
    if missing:
        raise ConfigError(f"{path} says nothing of shard {missing[0]!r}; give the entries of every shard")
    return hosted


def _planned(fleet: FleetConfig, name: str, routes: Mapping[str, str] | None) -> PlannedShard:
    shard = fleet.shard(name)
    labels = instance_labels(name, shard.replicas)
    instances: list[PlannedInstance] = []
    for slot, label in enumerate(labels):
        given = fleet.instance_config(shard, slot, replica_index=slot if len(labels) > 1 else None)
        instances.append(PlannedInstance(label, _ports(fleet, shard, slot), str(given.get(GYM_LOG_DIR_KEY, "-"))))
    mine = None if routes is None else sorted(route for route, host in routes.items() if host == name)
    slots, cpus = fleet.workers[name].slots, fleet.actor_cpus(shard)
    return PlannedShard(
        name, shard.replicas, slots, cpus, shard.config_paths, sorted(shard.inherited_overlays), mine, instances
    )


def _ports(fleet: FleetConfig, shard: ShardSpec, slot: int) -> str:
    ports = fleet.port_range(shard, slot)
    if ports is None:
        return "any" if fleet.opens_ports else "-"
    return f"{ports[0]}-{ports[1] - 1}"


def _check_rows(source: str | None, routes: Mapping[str, str] | None) -> str:
    """A sentence about the rows; raises what is wrong with them."""
    if source is None:
        return "The config is sound."
    found = read_rows(source, 1, expanded=True)
    with found.told_by_line():
        check_rows(found.rows, 1)
    rows, is_or_are = counted(len(found.rows), "row"), "is" if len(found.rows) == 1 else "are"
    each = f"every one of {rows}" if found.rows[1:] else "its one row"
    check_routes(found, routes)
    if routes is None:
        return f"The config is sound, and so {is_or_are} {rows}; routes are known only with --entries."
    return f"The config is sound, and {each} has a shard that hosts its route."


def _show(fleet: FleetConfig, shards: list[PlannedShard]) -> None:
    plan = fleet.plan
    kind = "sharded" if fleet.sharded else "not sharded: one shard, every route"
    out.print(f"run {fleet.run}, environment {fleet.environment}, {kind}", style="bold")
    bundles = sorted({shard.cpus for shard in shards})
    cpus = " or ".join(f"{cpu:g}" for cpu in bundles)
    out.print(f"{counted(plan.total_instances, 'bundle')} of {cpus} CPUs, {plan.placement_strategy}")
    table = new_table(
        "", ("shard", "replicas", "slots", "CPUs", "config files", "routes"), ("replicas", "slots", "CPUs")
    )
    for shard in shards:
        files = "\n".join([*shard.config_paths, *(f"(entry {entry})" for entry in shard.entries)])
        known = "known once it runs" if shard.routes is None else "\n".join(shard.routes)
        add_row(table, shard.shard, shard.replicas, shard.slots, f"{shard.cpus:g}", files, known)
    show_table(table)
    show_table(_instance_table(shards))


def _instance_table(shards: list[PlannedShard]) -> Table:
    table = new_table("", ("instance", "ports", "log folder"))
    for shard in shards:
        for instance in shard.instances:
            add_row(table, instance.label, instance.ports, instance.log_dir)
    return table


def _as_plain(fleet: FleetConfig, shards: list[PlannedShard], verdict: str) -> dict[str, Any]:
    plan = fleet.plan
    return {
        "run": fleet.run,
        "environment": fleet.environment,
        "sharded": fleet.sharded,
        "placement_strategy": plan.placement_strategy,
        "bundles": plan.total_instances,
        "shards": json.loads(json.dumps([asdict(shard) for shard in shards], default=str)),
        "verdict": verdict,
    }

"""The route map as the fleet published it: which shard hosts which route, fixed for a run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..broker.errors import NoInstanceError
from ..broker.keys import Keys
from ..broker.shard_records import ShardRecord, parse_record
from ..broker.steps import Runner

log = logging.getLogger("rolloutbus.producer")

VERSION_FIELD = ":version"
_POLL_S = 0.2
# A fleet that is just starting needs longer, and whoever mistyped the run's name should not wait for the end.
_TOLD_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class RouteMap:
    """`routes` is route → shard, `shards` the shards' records."""

    routes: Mapping[str, str] = field(default_factory=dict[str, str])
    shards: Mapping[str, ShardRecord] = field(default_factory=dict[str, ShardRecord])


async def read_route_map(runner: Runner, keys: Keys) -> RouteMap | None:
    """The map of the run, or None while no fleet has published one."""
    routes, shards = await runner.run([("HGETALL", keys.routes), ("HGETALL", keys.shards)])
    named = {name.decode(): shard.decode() for name, shard in _pairs(routes)}
    version = named.pop(VERSION_FIELD, None)
    if version is None and not named:
        return None
    records = {name.decode(): parse_record(raw) or ShardRecord.model_validate({}) for name, raw in _pairs(shards)}
    return RouteMap(named, records)


async def wait_for_route_map(runner: Runner, keys: Keys, timeout_s: float) -> RouteMap:
    """The map of the run, waiting for a fleet at most `timeout_s`; raises `NoInstanceError` naming the run."""
    began, told = time.monotonic(), False
    while True:
        found = await read_route_map(runner, keys)
        if found is not None:
            return found
        waited = time.monotonic() - began
        if waited >= timeout_s:
            raise NoInstanceError(
                f"no fleet has published its routes for run {keys.run!r} within {timeout_s:g} s; start one with "
                "`rolloutbus up`, or check that trainer and fleet use the same run and broker"
            )
        if waited >= _TOLD_AFTER_S and not told:
            told = True
            log.warning(
                "no fleet has published its routes for run %r yet; waiting up to %g s for one. `rolloutbus status` "
                "lists the runs of this broker",
                keys.run, timeout_s,
            )  # fmt: skip
        await asyncio.sleep(_POLL_S)


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    pairs = iter(flat)
    return list(zip(pairs, pairs, strict=True))

"""Fleets of stacks to watch: their config, a batch through them, and a look at the broker from outside."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rolloutbus.shard_workers import ShardFleet
from rolloutbus.trainer import RolloutClient

# Neither library types what it returns, and a test does not care.
ray: Any = importlib.import_module("ray")
Redis: TypeAlias = Any
StartFleet = Callable[..., ShardFleet]

ENVIRONMENT = "tests.shard_workers.fleet.stacks:ProbeEnvironment"
# Rollouts are seconds at most here, so whoever died is replaced long before a test gives up.
BROKER: dict[str, Any] = {
    "lease_s": 3.0,
    "renew_every_s": 0.25,
    "sweep_every_s": 0.5,
    "block_s": 1.0,
    "reconnect_timeout_s": 30.0,
}


def shard(name: str, hosts: Sequence[str] | None = None, *, replicas: int = 1, **overrides: Any) -> dict[str, Any]:
    """A shard of one probe; `overrides` reach its environment."""
    keys = {key: overrides.pop(key) for key in ("port_range_low", "port_range_high", "actor_cpus") if key in overrides}
    return {
        "name": name,
        "replicas": replicas,
        "config_paths": ["none.yaml"],
        "overrides": {"hosts": list(hosts or [name]), **overrides},
        **keys,
    }


def fleet_config(
    url: str,
    folder: Path,
    shards: Sequence[Mapping[str, Any]],
    *,
    strategy: str = "PACK",
    fleet: Mapping[str, Any] = {},
    workers: Mapping[str, Any] = {},
    broker: Mapping[str, Any] = {},
    gym: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """A config with its own run; each shard gets a port range of its own."""
    ranges = [{"port_range_low": 20000 + 500 * at, "port_range_high": 20500 + 500 * at} for at in range(len(shards))]
    return {
        "rolloutbus": {
            "run": f"fleet-{secrets.token_hex(4)}",
            "environment": ENVIRONMENT,
            "broker": {"url": url, **BROKER, **broker},
            "fleet": {
                "placement_timeout_s": 30,
                "startup_timeout_s": 60,
                "stop_timeout_s": 15,
                "restart_backoff_s": 0.1,
                **fleet,
            },
            "workers": {"drain_timeout_s": 20, "health_every_s": 0.3, **workers},
        },
        "env": {
            "nemo_gym": {
                "folder": str(folder),
                "placement_strategy": strategy,
                "shards": [{"actor_cpus": 0.05, **ports, **spec} for ports, spec in zip(ranges, shards, strict=True)],
                **gym,
            }
        },
    }


def connected(url: str) -> Redis:
    """A plain client, to look at the broker from outside; a context manager."""
    redis: Any = importlib.import_module("redis")
    return redis.Redis.from_url(url, decode_responses=True)


def rows_for(routes: Sequence[str], groups: int, size: int = 4) -> list[dict[str, Any]]:
    """`groups` prompt groups of `size` rows, their routes in turn."""
    return [
        {"responses_create_params": {"input": f"prompt {group}"}, "agent_ref": {"name": routes[group % len(routes)]}}
        for group in range(groups)
        for _ in range(size)
    ]


@asynccontextmanager
async def open_batch(fleet: ShardFleet, groups: int, routes: Sequence[str] = ("math",)) -> AsyncGenerator[Any]:
    """A batch of groups of four through the fleet."""
    async with (
        RolloutClient.connect(fleet.broker.url, run=fleet.run, settings=BROKER) as client,
        client.run_groups(rows_for(routes, groups), 4) as batch,
    ):
        yield batch

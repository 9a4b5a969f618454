"""Where instances go: the Ray this process is connected to, and placement groups on it.

A Ray that was there is left as it is; one that was started for the fleet ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.placement_group import placement_group_table as describe  # pyright: ignore[reportUnknownVariableType]

from ..fleet_config import FleetConfig, cluster_address
from ..plan_errors import ShardSetupError
from ..plan_spec import DEFAULT_PLACEMENT_STRATEGY

_POLL_S = 0.05
# Each look is a call to the cluster's control store, and returns at once when everything is placed.
_PLACED_WAIT_S = 0.5
# Long for a bundle's return, short for whoever shuts down a cluster that is half gone.
RELEASED_WITHIN_S: Final = 10.0
_NODE_ID_LABEL: Final = "ray.io/node-id"
_ANSWER_WITHIN_S: Final = 10.0


@dataclass(frozen=True)
class Bundle:
    """A place for one instance: `index` in `group`. One that `stands_alone` was made for that instance only."""

    group: PlacementGroup
    index: int
    cpus: float
    stands_alone: bool = False


# A local Ray is given this many times the CPUs of the plan.
LOCAL_ROOM = 4


class RaySession:
    """The connection to Ray for a fleet; `started_here` tells whether it was opened here.

    Raises `ShardSetupError` where there is none to be had, and before one starts on which the plan could never run.
    """

    def __init__(self, config: FleetConfig) -> None:
        self.started_here = not ray.is_initialized()
        # One machine, to which nobody adds another.
        self.is_local = False
        if not self.started_here:
            return
        address = cluster_address(config.fleet.address)
        self.is_local = address is None
        if address is None and (why := config.hopeless_here) is not None:
            raise ShardSetupError(why)
        if address is not None:
            _require_answer(address)
        options: dict[str, Any] = {"address": address} if address else _local_options(config.cpus)
        try:
            # Ray's own word of its start is no news to whoever starts a fleet.
            with _token_notice_withheld():
                cast("Any", ray).init(log_to_driver=False, logging_level="WARNING", **options)
        except Exception as error:
            where = f"the Ray cluster at {address}" if address else "a local Ray"
            raise ShardSetupError(
                f"cannot connect to {where}: {type(error).__name__}: {error}; check `rolloutbus.fleet.address` "
                "and that it runs"
            ) from None

    @property
    def is_gone(self) -> bool:
        """Whether a part of the local Ray that was started here has ended by itself. Ray would look for it for a minute
        and then end this process.
        """
        worker = getattr(getattr(ray, "_private", None), "worker", None)
        node = getattr(worker, "_global_node", None)
        return self.started_here and self.is_local and node is not None and bool(node.dead_processes())

    def close(self) -> None:
        """End what was started here; safe twice."""
        if self.started_here:
            self.started_here = False
            cast("Any", ray).shutdown()


def _require_answer(address: str) -> None:
    """Raise `ShardSetupError` where nobody listens: Ray would try for a quarter of an hour, deaf to every signal."""
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    parts = urlsplit(known if "://" in known else f"//{known}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        return
    if not host or not port:
        return
    try:
        socket.create_connection((host, port), timeout=_ANSWER_WITHIN_S).close()
    except OSError as error:
        raise ShardSetupError(
            f"no Ray cluster answers at {known} ({error}); check `rolloutbus.fleet.address`, `--address` and "
            "RAY_ADDRESS, and that its head runs"
        ) from None


@contextlib.contextmanager
def _token_notice_withheld() -> Generator[None]:
    """Ray warns that its token authentication is on, which is as it should be; that it is off is still told."""
    logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
    logger.addFilter(_is_no_token_notice)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_token_notice)


def _is_no_token_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Token authentication is enabled for this Ray cluster")


def _local_options(cpus: float) -> dict[str, Any]:
    # Stacks wait for models and servers most of the time; on one machine their CPUs are a matter of book-keeping.
    # The rest is room for `scale`.
    room = max(os.cpu_count() or 1, math.ceil(cpus * LOCAL_ROOM))
    return {"address": "local", "include_dashboard": False, "num_cpus": room}


async def place(
    cpus: Sequence[float], strategy: str, timeout_s: float, avoid_nodes: Sequence[str] = ()
) -> PlacementGroup:
    """A placement group with a bundle per number of CPUs, placed within `timeout_s`; `ShardSetupError` with the numbers
    otherwise.
    """
    selector = {_NODE_ID_LABEL: f"!in({','.join(avoid_nodes)})"} if avoid_nodes else None
    group = placement_group(
        [{"CPU": count} for count in cpus],
        strategy=strategy,
        bundle_label_selector=cast("Any", [selector] * len(cpus) if selector else None),
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not await asyncio.to_thread(group.wait, _PLACED_WAIT_S):
            if time.monotonic() >= deadline:
                raise ShardSetupError(_not_placed(cpus, strategy, timeout_s, avoid_nodes))
    except BaseException:
        await release(group)
        raise
    return group


async def release(group: PlacementGroup) -> None:
    """Give the bundles back, and wait until they are free."""
    remove_placement_group(group)
    deadline = time.monotonic() + RELEASED_WITHIN_S
    while time.monotonic() < deadline:
        state: object = _table(group).get("state")
        if state in (None, "REMOVED"):
            return
        await asyncio.sleep(_POLL_S)


def node_of(bundle: Bundle) -> str:
    """The id of the node where the bundle is now."""
    return _table(bundle.group).get("bundles_to_node_id", {}).get(bundle.index, "")


def _table(group: PlacementGroup) -> dict[str, Any]:
    return cast("Any", describe)(group)


def _not_placed(cpus: Sequence[float], strategy: str, timeout_s: float, avoid_nodes: Sequence[str]) -> str:
    sizes = ", ".join(f"{sum(c == size for c in cpus)} of {size:g} CPU" for size in dict.fromkeys(cpus))
    nodes = [node for node in cast("list[dict[str, Any]]", ray.nodes()) if node["Alive"]]
    totals = ", ".join(f"{cpus:g}" for cpus in sorted(node["Resources"].get("CPU", 0.0) for node in nodes))
    free = cast("dict[str, float]", ray.available_resources()).get("CPU", 0.0)
    taken = f", {len(avoid_nodes)} of them with an instance already" if avoid_nodes else ""
    where = "on nodes of their own" if avoid_nodes else f"under {strategy}"
    remedies = ["Add nodes", "lower `actor_cpus` or `replicas`", "raise `rolloutbus.fleet.placement_timeout_s`"]
    if avoid_nodes or strategy == DEFAULT_PLACEMENT_STRATEGY:
        remedies.append("on one machine, set `env.nemo_gym.placement_strategy: PACK`")
    return (
        f"{len(cpus)} bundles ({sizes} each) could not be placed {where} within {timeout_s:g} s: the cluster "
        f"has {len(nodes)} nodes with {totals or 'no'} CPUs{taken}, and {free:g} CPUs are free in all. "
        f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
    )

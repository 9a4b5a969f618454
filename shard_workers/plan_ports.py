"""Port ranges where stacks may share a node.

Promises: under every placement strategy but `STRICT_SPREAD` no two instances of a plan that passed the check
are told to use the same port. Shards have ranges of their own, and replicas of one shard get disjoint slices
of its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

from .plan_errors import ShardConfigError
from .plan_spec import DEFAULT_PLACEMENT_STRATEGY, ShardSpec
from .plan_text import key_path, raise_problems

# A NeMo Gym stack listens on one port per server and has up to ten of them; below that a replica would find
# its slice full in the middle of its start.
MIN_PORTS_PER_REPLICA: Final = 10


def check_ports(shards: Sequence[ShardSpec], placement_strategy: str) -> None:
    """Refuse what could make two stacks on one node fight for a port; raises `ShardConfigError`."""
    if placement_strategy == DEFAULT_PLACEMENT_STRATEGY:
        return
    problems: list[str] = []
    for index, shard in enumerate(shards):
        problems += _unusable_range(index, shard, placement_strategy)
    for (index, shard), (other_index, other) in combinations(enumerate(shards), 2):
        problems += _overlap(f"shards[{index}]", shard, f"shards[{other_index}]", other)
    raise_problems(problems)


def replica_port_range(
    shard: ShardSpec, replica_index: int, placement_strategy: str = DEFAULT_PLACEMENT_STRATEGY
) -> tuple[int, int] | None:
    """The half-open port range `(low, high)` of one replica; None if the shard has no range of its own.

    The range is cut evenly, by the number of replicas that `shard` says now. A range too narrow to be cut is given
    whole under `STRICT_SPREAD`, where each replica has a node for itself, and to a shard's only replica; anywhere else
    it is a `ShardConfigError`. Slices of different replica counts overlap: after scaling, a new instance relies on the
    ports of those that already run being bound.
    """
    if not 0 <= replica_index < shard.replicas:
        raise ShardConfigError(
            f"shard {shard.name!r} has no replica {replica_index}; it has {shard.replicas}, counted from 0"
        )
    low, high = shard.port_range_low, shard.port_range_high
    if low is None or high is None:
        return None
    if _ports_per_replica(shard) < MIN_PORTS_PER_REPLICA:
        if shard.replicas > 1 and placement_strategy != DEFAULT_PLACEMENT_STRATEGY:
            raise ShardConfigError(_too_narrow(f"shard {shard.name!r}", shard, placement_strategy))
        return low, high
    # Multiplying first spreads the remainder, so that the slices cover the range without a gap.
    span = high - low
    return low + replica_index * span // shard.replicas, low + (replica_index + 1) * span // shard.replicas


def _ports_per_replica(shard: ShardSpec) -> int:
    return ((shard.port_range_high or 0) - (shard.port_range_low or 0)) // shard.replicas


def _unusable_range(index: int, shard: ShardSpec, placement_strategy: str) -> list[str]:
    path = key_path(f"shards[{index}]", shard.name)
    if shard.port_range_low is None or shard.port_range_high is None:
        return [
            f"{path} needs `port_range_low` and `port_range_high`, because {key_path('placement_strategy')} "
            f"{placement_strategy} may put two stacks on one node; give every shard a range of its own, or "
            f"use {DEFAULT_PLACEMENT_STRATEGY}, which needs one node per instance; entries that name Python functions "
            "need no ports under `rolloutbus.environment: functions`"
        ]
    if shard.replicas == 1 or _ports_per_replica(shard) >= MIN_PORTS_PER_REPLICA:
        return []
    return [_too_narrow(path, shard, placement_strategy)]


def _too_narrow(named: str, shard: ShardSpec, placement_strategy: str) -> str:
    ports = (shard.port_range_high or 0) - (shard.port_range_low or 0)
    return (
        f"{named} has {shard.replicas} replicas and {ports} ports ({_range_text(shard)}). Under {placement_strategy} "
        f"replicas may share a node, so each gets its own slice, here {_ports_per_replica(shard)} ports, and needs at "
        f"least {MIN_PORTS_PER_REPLICA}; widen the range to {shard.replicas * MIN_PORTS_PER_REPLICA} ports or lower "
        "`replicas`"
    )


def _overlap(path: str, shard: ShardSpec, other_path: str, other: ShardSpec) -> list[str]:
    if None in (shard.port_range_low, shard.port_range_high, other.port_range_low, other.port_range_high):
        return []
    low = max(shard.port_range_low or 0, other.port_range_low or 0)
    high = min(shard.port_range_high or 0, other.port_range_high or 0)
    if low >= high:
        return []
    return [
        f"{key_path(path, shard.name)} has the ports {_range_text(shard)} and "
        f"{key_path(other_path, other.name)} has {_range_text(other)}; both hold {_bounds_text(low, high)}, "
        "so two stacks on one node could take the same port. Move one of the ranges"
    ]


def _range_text(shard: ShardSpec) -> str:
    return _bounds_text(shard.port_range_low or 0, shard.port_range_high or 0)


def _bounds_text(low: int, high: int) -> str:
    return f"{low} to {high - 1}" if high - low > 1 else f"{low}"

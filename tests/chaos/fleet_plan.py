"""What a fleet's schedule does, derived from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.chaos.plan import BROKER_SETTINGS, MANY_ATTEMPTS, BatchPlan, Plan, ShardPlan

# Long enough that a start, slow as it is on a busy machine, falls into the batch.
BATCH_S = (5.0, 10.0)
ONE_NODE_EACH = "STRICT_SPREAD"
NODES = 3
KINDS = (
    "asked+asked",
    "asked+kill",
    "asked+restart",
    "asked+slow",
    "broker-restart",
    "drain",
    "drain-asked",
    "kill",
    "node-lost",
    "scale+drain",
    "scale+kill",
    "scale-asked",
    "scale-down",
    "scale-up",
)


@dataclass(frozen=True)
class Operation:
    """`at` counts groups that the trainer has logged; `many` instances more or fewer; `victim` and `pause_s` say whom
    and how soon after the first half of it.
    """

    kind: str
    shard: str
    at: int
    many: int
    victim: int
    pause_s: float
    overlaps: bool


@dataclass(frozen=True)
class FleetPlan:
    """`plan` as the verdict knows it. A stack takes `start_ms` to be up, and as much more for each slot before its own;
    where the fleet does not settle, it is shut down while what was killed may still be on its way back. `strategy` is
    that of placement.
    """

    plan: Plan
    operations: tuple[Operation, ...]
    start_ms: int
    drain_s: float
    settles: bool
    strategy: str


def make_fleet_plan(seed: int, only: Sequence[str] = ()) -> FleetPlan:
    """The schedule that `seed` stands for, its operations of the kinds `only` where some are given."""
    dice = random.Random(f"{seed}:fleet")
    shards = (
        ShardPlan("wide", 2, "row", dice.choice(["group", "missing"])),
        ShardPlan("narrow", dice.choice([1, 2]), dice.choice(["row", "group"]), "group"),
    )
    slots = dice.choice([1, 2, 4])
    count = dice.choice([1, 1, 2])
    client = dice.choice(["trainer", "second"])
    first = _batch(dice, shards, slots, 0)
    batches = (first, replace(_batch(dice, shards, slots, 1), client=client))[:count]
    operations = tuple(_operation(dice, only or KINDS, shards, first.groups) for _ in range(dice.choice([1, 2, 2, 3])))
    settings = dict(BROKER_SETTINGS)
    if dice.random() < 0.2:
        settings |= {"max_queued_bytes": 20_000, "max_unread_bytes": 30_000}
    plan = Plan(
        seed=seed, fault=" & ".join(operation.kind for operation in operations), shards=shards, batches=batches,
        persistence=dice.choice(["everysec", "always"]), tcp=dice.random() < 0.5, slots=slots, at=0, victim=0,
        hold_s=dice.choice([0.2, 0.6, 1.2, 2.0, 3.0]), replace_after_s=0, kill_count=0,
        trainer_delay_s=dice.choice([0.0, 0.0, 0.01]), infra_attempts=MANY_ATTEMPTS, settings=settings,
    )  # fmt: skip
    start_ms, drain_s, settles = dice.choice([0, 200, 600, 600]), dice.choice([0.1, 1.0, 5.0]), dice.random() < 0.7
    room = sum(shard.replicas for shard in shards) <= NODES
    strategy = dice.choice(["PACK", "SPREAD", ONE_NODE_EACH if room else "SPREAD"])
    return FleetPlan(plan, operations, start_ms, drain_s, settles, strategy)


def _operation(dice: random.Random, kinds: Sequence[str], shards: Sequence[ShardPlan], groups: int) -> Operation:
    return Operation(
        kind=dice.choice(kinds),
        shard=dice.choice(shards).name,
        at=dice.randrange(0, max(1, groups * 2 // 3)),
        many=dice.choice([1, 2]),
        victim=dice.randrange(64),
        pause_s=dice.choice([0.0, 0.0, 0.05, 0.3, 0.6, 1.0]),
        overlaps=dice.random() < 0.6,
    )


def _batch(dice: random.Random, shards: Sequence[ShardPlan], slots: int, number: int) -> BatchPlan:
    """As many groups as keep the fleet busy for about `BATCH_S`."""
    size = dice.choice([1, 2, 4, 8])
    slowest_ms = dice.choice([100, 200, 400])
    group_s = (5 + (slowest_ms - 5) * size / (size + 1)) / 1000
    places = slots * sum(shard.replicas for shard in shards)
    groups = max(24, min(400, int(dice.uniform(*BATCH_S) * places / group_s)))
    filler = dice.choice([50, 50, 2_000])
    rows = [
        {
            "responses_create_params": {"input": "x" * filler},
            "agent_ref": {"name": shard},
            "key": f"{number}-{group}-{at}",
            "ms": dice.randrange(5, slowest_ms + 1),
            "trouble": trouble,
            "filler": filler,
        }
        for group in range(groups)
        for shard, trouble in [(dice.choice(shards).name, dice.choices(["", "once", "always"], [95, 3, 2])[0])]
        for at in range(size)
    ]
    return BatchPlan(size, rows, by_row=dice.random() < 0.35)

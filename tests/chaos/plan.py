"""What one schedule does, derived from its seed alone: sizes, settings, and where and how the fault strikes.

The same seed and fault give the same plan; only the operating system's timing differs between two runs of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

KILL_POINTS = ("read", "start", "environment", "written", "acknowledged")
LEASE_S = 1.5
ABANDON_S = 6.0
KEY_TTL_S = 30.0
# A group that several faults hit must not die of it; one that kills its instances must, and take nobody with it.
MANY_ATTEMPTS, FEW_ATTEMPTS = 20, 3
# Beyond this nothing may wait, whatever was broken: several leases, a restart and a trainer's take-over fit in well.
HARD_LIMIT_S = 75.0

BROKER_SETTINGS: dict[str, Any] = {
    "lease_s": LEASE_S,
    "renew_every_s": 0.2,
    "abandon_after_s": ABANDON_S,
    "sweep_every_s": 0.5,
    "key_ttl_s": KEY_TTL_S,
    "block_s": 0.5,
    "connect_timeout_s": 1.0,
    "command_timeout_s": 1.5,
    "reconnect_timeout_s": 25.0,
    "no_instance_timeout_s": 25.0,
    "stall_warning_s": 4.0,
}


@dataclass(frozen=True)
class ShardPlan:
    """A shard of the run; `scored` environments wait for all rows of a group in one process."""

    name: str
    replicas: int
    commit: str
    rerun: str

    @property
    def labels(self) -> list[str]:
        return [self.name] if self.replicas == 1 else [f"{self.name}/{at}" for at in range(self.replicas)]


@dataclass(frozen=True)
class BatchPlan:
    """Rows of one call; `rows` are complete, so the trainer, the environment and the verdict all know them. `client`
    runs it, and asks for single rows where it is `by_row`.
    """

    size: int
    rows: list[dict[str, Any]] = field(repr=False)
    client: str = "trainer"
    by_row: bool = False

    @property
    def groups(self) -> int:
        return len(self.rows) // self.size

    @property
    def order(self) -> dict[str, Any]:
        """What a trainer is told of it."""
        return {"rows": self.rows, "size": self.size, "client": self.client, "by_row": self.by_row}


@dataclass(frozen=True)
class Plan:
    """One schedule. `at` counts groups that the trainer has logged when the fault strikes."""

    seed: int
    fault: str
    shards: tuple[ShardPlan, ...]
    batches: tuple[BatchPlan, ...]
    persistence: str
    tcp: bool
    slots: int
    at: int
    victim: int
    hold_s: float
    replace_after_s: float
    kill_count: int
    trainer_delay_s: float
    infra_attempts: int
    settings: dict[str, Any]

    @property
    def labels(self) -> list[str]:
        return [label for shard in self.shards for label in shard.labels]

    def shard(self, label: str) -> ShardPlan:
        """The shard of that name, or the one that hosts the instance `label`."""
        return next(shard for shard in self.shards if label.split("/")[0] == shard.name)

    def dice(self, purpose: str) -> random.Random:
        """Randomness of its own for each part of the schedule, so that one does not shift another's."""
        return random.Random(f"{self.seed}:{self.fault}:{purpose}")


def make_plan(seed: int, fault: str) -> Plan:
    """The schedule that `seed` stands for."""
    dice = random.Random(f"{seed}:{fault}:plan")
    shards = _shards(dice)
    batches = _asked_for(
        tuple(_batch(dice, fault, shards, at) for at in range(dice.choice([1, 1, 2]))),
        random.Random(f"{seed}:{fault}:clients"),
    )
    if fault == "poison":
        batches = (_poisoned(batches[0], random.Random(f"{seed}:{fault}:group")), *batches[1:])
    needs_file = fault in ("broker-cut", "broker-restart", "mixed")
    settings = dict(BROKER_SETTINGS)
    if dice.random() < 0.3:
        settings |= {"max_queued_bytes": 20_000, "max_unread_bytes": 30_000}
    return Plan(
        seed=seed,
        fault=fault,
        shards=shards,
        batches=batches,
        persistence="everysec" if fault == "broker-cut" or dice.random() < 0.6 or not needs_file else "always",
        tcp=dice.random() < 0.5,
        slots=dice.choice([1, 2] if fault == "trainer-gone" else [1, 2, 4, 8]),
        at=dice.randrange(0, max(1, batches[0].groups // 2)),
        victim=dice.randrange(0, 64),
        hold_s=dice.choice([0.2, 0.6, 1.2, 2.0, 3.0]),
        replace_after_s=dice.choice([0.0, 0.0, 0.5, 2.5]),
        kill_count=dice.randrange(1, 6),
        trainer_delay_s=dice.choice([0.0, 0.0, 0.01, 0.05]),
        infra_attempts=FEW_ATTEMPTS if fault == "poison" else MANY_ATTEMPTS,
        settings=settings,
    )


def _shards(dice: random.Random) -> tuple[ShardPlan, ...]:
    scored = ShardPlan("scored", dice.choice([2, 3]), "group", "group")
    solo = ShardPlan("solo", dice.choice([2, 3]), "row", dice.choice(["group", "missing"]))
    choice = dice.random()
    if choice < 0.35:
        return (scored,)
    if choice < 0.8:
        return (solo,)
    return (ShardPlan("scored", 2, "group", "group"), ShardPlan("solo", 1, "row", solo.rerun))


def _asked_for(batches: tuple[BatchPlan, ...], dice: random.Random) -> tuple[BatchPlan, ...]:
    """By whom, and how: two batches of one client run one after the other, those of two clients at the same time."""
    clients = ["trainer", dice.choice(["trainer", "second"])]
    return tuple(
        replace(batch, client=client, by_row=dice.random() < 0.3)
        for batch, client in zip(batches, clients, strict=False)
    )


def _batch(dice: random.Random, fault: str, shards: tuple[ShardPlan, ...], number: int) -> BatchPlan:
    size = dice.choice([1, 2, 4, 8])
    filler = dice.choice([50, 50, 2_000, 20_000])
    # Larger than an entry may be with others, so that a group comes in several.
    result_bytes = dice.choice([filler, filler, filler, 300_000])
    slowest_ms = 400 if fault == "trainer-gone" else dice.choice([40, 150, 400])
    rows: list[dict[str, Any]] = []
    for group in range(dice.randrange(10, 20) if result_bytes > 100_000 else dice.randrange(16, 48)):
        shard = dice.choice(shards).name
        trouble = dice.choices(["", "once", "always"], [92, 5, 3])[0]
        # One in ten is the long tail: it outlives a lease, so it is renewed or the group is lost.
        ms = 2_000 if dice.random() < 0.04 else slowest_ms
        for _ in range(size):
            rows.append(
                {
                    "responses_create_params": {"input": "x" * filler},
                    "agent_ref": {"name": shard},
                    "key": f"{number}-{group}-{len(rows)}",
                    "ms": dice.randrange(1, ms),
                    "trouble": trouble,
                    "filler": result_bytes,
                }
            )
    return BatchPlan(size, rows)


def _poisoned(batch: BatchPlan, dice: random.Random) -> BatchPlan:
    """The batch with one group that ends the process of whoever runs it."""
    group = dice.randrange(batch.groups)
    rows = [{**row, "trouble": "kill"} if at // batch.size == group else row for at, row in enumerate(batch.rows)]
    return replace(batch, rows=rows)

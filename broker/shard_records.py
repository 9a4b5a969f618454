"""What a shard's record on the broker says: how many replicas it has, and how its groups are to be run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .settings import Seconds


class ShardRecord(BaseModel):
    """One field of the `shards` hash, as JSON. Written by the fleet, read by producers, workers, collectors and
    operators.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    replicas: int = Field(default=1, ge=0)
    slots: int = Field(default=64, ge=1)
    commit: Literal["row", "group"] = "row"
    rerun: Literal["group", "missing"] = "group"
    group_timeout_s: Seconds = Field(default=3600.0, gt=0)
    entries: dict[str, list[str]] = Field(default_factory=dict)
    # Instances by name: after scaling and draining they need not be 0 … replicas-1.
    labels: list[str] = Field(default_factory=list)
    # Set by the fleet when the shard has no replica left and none will come.
    lost: str = ""

    def instances(self, shard: str) -> list[str]:
        """The labels of the shard's instances."""
        return self.labels or instance_labels(shard, self.replicas)


def instance_labels(shard: str, replicas: int) -> list[str]:
    """`math`, or `math/0`, `math/1` where there are several."""
    return [shard] if replicas == 1 else [f"{shard}/{replica}" for replica in range(replicas)]


def shard_of_label(label: str) -> str:
    """The shard of an instance by its label."""
    return label.partition("/")[0]


def parse_record(raw: bytes | None) -> ShardRecord | None:
    """The record, or None where there is none or it is not one of ours."""
    if not raw:
        return None
    try:
        return ShardRecord.model_validate_json(raw)
    except ValidationError:
        return None

"""How an instance runs its groups: how many at once, how long, how often again. Times are seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..broker.settings import Seconds


class WorkerSettings(BaseModel):
    """Defaults for all shards; each may be overridden per shard."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: int = Field(default=64, ge=1)
    commit: Literal["row", "group"] = "row"
    rerun: Literal["group", "missing"] = "group"
    group_timeout_s: Seconds = Field(default=3600.0, gt=0)
    infra_attempts: int = Field(default=5, ge=1)
    data_attempts: int = Field(default=2, ge=1)
    retry_backoff_s: Seconds = Field(default=1.0, ge=0)
    retry_backoff_max_s: Seconds = Field(default=60.0, ge=0)
    # How long running groups may go on when the instance is asked to stop; then they are handed back.
    drain_timeout_s: Seconds = Field(default=30.0, ge=0)
    # How long an environment may take to give way to a cancellation before its task is left behind.
    cancel_grace_s: Seconds = Field(default=5.0, gt=0)
    health_every_s: Seconds = Field(default=10.0, gt=0)

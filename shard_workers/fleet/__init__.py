"""The Ray fleet: instances on a cluster, watched over. The only part of rolloutbus that imports Ray."""

from __future__ import annotations

from .fleet import ShardFleet
from .handles import HandleFleet, as_shard_fleet, shutdown_environments
from .instances import InstanceStatus

__all__ = ["HandleFleet", "InstanceStatus", "ShardFleet", "as_shard_fleet", "shutdown_environments"]

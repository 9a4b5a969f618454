"""The two errors of the shard plan: a wrong configuration, and a start that went wrong."""

from __future__ import annotations

from ..broker.errors import ConfigError, FleetError


class ShardConfigError(ConfigError):
    """`env.nemo_gym` is no valid shard plan; the message carries the key path and the way out."""


class ShardSetupError(FleetError):
    """The shards that started, or the data they are to serve, do not fit together."""

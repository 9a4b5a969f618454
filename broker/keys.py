"""Every key name of a run, and nothing else.

All keys of a run share one hash tag, so that each transition is atomic also on a Redis Cluster, and runs spread over
its nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ConfigError

GROUP_NAME = "workers"
UNSHARDED_SHARD = "nemo_gym"
# The key of a route map in which every route leads to the one shard of an unsharded run.
ANY_ROUTE = "*"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it can stand in a key and on a command line; raise `ConfigError` otherwise."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{kind} {name!r} cannot be a name on the broker: use letters, digits, dot, underscore and hyphen, "
            "starting with a letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of the run `run`."""

    run: str

    def __post_init__(self) -> None:
        check_name("run", self.run)

    @property
    def prefix(self) -> str:
        return f"rolloutbus:{{{self.run}}}:"

    @property
    def routes(self) -> str:
        return self.prefix + "routes"

    @property
    def shards(self) -> str:
        return self.prefix + "shards"

    @property
    def fleet(self) -> str:
        return self.prefix + "fleet"

    @property
    def fleet_requests(self) -> str:
        return self.prefix + "fleet:requests"

    @property
    def dead(self) -> str:
        return self.prefix + "dead"

    @property
    def events(self) -> str:
        return self.prefix + "events"

    def instance(self, label: str) -> str:
        return f"{self.prefix}instance:{label}"

    def groups(self, shard: str) -> str:
        return f"{self.prefix}groups:{shard}"

    def delayed(self, shard: str) -> str:
        return f"{self.prefix}delayed:{shard}"

    def parked(self, shard: str) -> str:
        return f"{self.prefix}parked:{shard}"

    def results(self, client: str, shard: str) -> str:
        return f"{self.prefix}results:{client}:{shard}"

    def batch(self, batch: str) -> str:
        return f"{self.prefix}batch:{batch}"

    def accepted(self, batch: str) -> str:
        return f"{self.prefix}accepted:{batch}"

    def owner(self, client: str) -> str:
        return f"{self.prefix}owner:{client}"

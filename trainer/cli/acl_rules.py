"""What each role may do on the broker, as `ACL SETUSER` rules for one run.

A role may call scripts on the keys that its transitions name, and do with each family of keys exactly what those
transitions and its reads do: that is what the selectors (in parentheses) are for, because the server checks a script's
own calls too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...broker.keys import Keys

PASSWORD = "PASSWORD"

_CONNECT = "client|setname client|id info ping select"
_SCRIPTS = "evalsha script|load multi exec time type exists pttl pexpire"
_BATCH = "hget hmget hgetall hset hincrby"
_QUEUES = "delayed:* parked:*"


@dataclass(frozen=True)
class Grant:
    """Commands on a family of keys, both separated by spaces; `*` in a key stands for any name."""

    keys: str
    commands: str


@dataclass(frozen=True)
class Role:
    """`commands` are free of keys, `script_keys` are those that a script may be called with."""

    what: str
    commands: str
    script_keys: str
    grants: tuple[Grant, ...]

    def __or__(self, other: Role) -> Role:
        """A role that may do what either may."""
        return Role(
            f"{self.what}; {other.what}",
            f"{self.commands} {other.commands}",
            f"{self.script_keys} {other.script_keys}",
            (*self.grants, *other.grants),
        )


_PRODUCER = Role(
    "publishes batches",
    f"{_CONNECT} {_SCRIPTS}",
    f"batch:* accepted:* owner:* groups:* results:* events {_QUEUES}",
    (
        Grant("batch:*", _BATCH),
        Grant("batch:* accepted:*", "del"),
        Grant("owner:*", "get set"),
        Grant("owner:* results:*", "del"),
        Grant("groups:*", "xadd xrevrange xdel xack xgroup|create"),
        Grant("results:*", "xgroup|create xgroup|destroy"),
        Grant(_QUEUES, "zrange zrem"),
        Grant("events", "xadd"),
        Grant("routes shards", "hgetall"),
    ),
)
_COLLECTOR = Role(
    "collects results",
    f"{_CONNECT} {_SCRIPTS} client|unblock",
    f"batch:* accepted:* owner:* groups:* results:* events dead {_QUEUES}",
    (
        Grant("batch:*", _BATCH),
        Grant("batch:* accepted:*", "del"),
        Grant("owner:*", "get set"),
        Grant("owner:* results:*", "del"),
        Grant("results:*", "xread xadd xlen xrange xack xdel xgroup|create xgroup|destroy"),
        Grant("groups:*", "xlen xrange xpending xinfo|groups xdel xack"),
        Grant(_QUEUES, "zadd zrange zrem zscore"),
        Grant("events dead", "xadd"),
        Grant("dead", "xlen xtrim memory|usage"),
        Grant("instance:*", "exists"),
        Grant("routes shards", "hgetall"),
    ),
)
_WORKER = Role(
    "runs groups",
    f"{_CONNECT} {_SCRIPTS} client|unblock",
    f"batch:* accepted:* owner:* groups:* results:* instance:* events dead {_QUEUES}",
    (
        Grant("batch:*", _BATCH),
        Grant("owner:*", "get"),
        Grant("groups:*", "xreadgroup xrange xpending xclaim xack xdel xgroup|create xgroup|delconsumer"),
        Grant(_QUEUES, "zadd zrem zcard zrangebyscore"),
        Grant("accepted:*", "setbit getbit bitfield"),
        Grant("results:*", "xadd xrevrange xdel"),
        Grant("instance:*", "hget hset del"),
        Grant("events dead", "xadd"),
        Grant("dead", "xlen xtrim memory|usage"),
        Grant("shards", "hget"),
    ),
)
_FLEET = Role(
    "starts workers, publishes routes and shard records",
    f"{_CONNECT} {_SCRIPTS} scan",
    f"fleet fleet:requests routes shards groups:* instance:* {_QUEUES}",
    (
        Grant("fleet", "get set"),
        Grant("fleet:requests", "hget hgetall hset hdel"),
        Grant("routes shards", "hget hgetall hset hexists"),
        Grant("groups:*", "xlen xpending xclaim xgroup|delconsumer"),
        # One DEL names several of them, so one selector has to.
        Grant(f"fleet fleet:requests routes shards groups:* {_QUEUES}", "del"),
        Grant("instance:*", "hget del"),
        Grant("batch:*", "hget"),
        Grant("events", "xadd"),
    ),
)
_OBSERVER = Role(
    "looks: status, explain, dead list and show, doctor",
    f"{_CONNECT} scan time",
    "",
    (
        Grant("%R *", "hget hmget hgetall get exists type pttl xlen xrange xpending xinfo|groups zcard eval_ro"),
    ),
)  # fmt: skip
_OPERATOR = Role(
    "cancels batches, drops and replays dead letters, asks fleets to scale and drain",
    _SCRIPTS,
    f"batch:* groups:* results:* fleet fleet:requests {_QUEUES}",
    (
        Grant("batch:*", _BATCH),
        Grant("groups:*", "xack xdel"),
        Grant("results:*", "xadd"),
        Grant(_QUEUES, "zrange zrem"),
        Grant("fleet:requests", "hget hset hdel"),
        Grant("dead", "xdel"),
    ),
)

ROLES = {
    "producer": _PRODUCER,
    "collector": _COLLECTOR,
    "trainer": _PRODUCER | _COLLECTOR,
    "worker": _WORKER,
    # Its workers connect with the fleet's own URL.
    "fleet": _WORKER | _FLEET,
    "observer": _OBSERVER,
    # A replay is a batch of its own.
    "operator": _OBSERVER | _OPERATOR | _PRODUCER | _COLLECTOR,
}


def user_name(run: str, role: str) -> str:
    return f"rolloutbus-{run}-{role}"


def rule(run: str, role: str, password: str = PASSWORD) -> list[str]:
    """The words of the command that makes the role's user, ready to be sent, or joined and typed."""
    given, prefix = ROLES[role], Keys(run).prefix
    words = ["ACL", "SETUSER", user_name(run, role), "reset", "on", f">{password}"]
    words += [f"~{prefix}{suffix}" for suffix in _once(given.script_keys)]
    words += _allowed(given.commands)
    return words + [_selector(prefix, grant) for grant in dict.fromkeys(given.grants)]


def _selector(prefix: str, grant: Grant) -> str:
    mark, suffixes = ("%R~", grant.keys[3:]) if grant.keys.startswith("%R ") else ("~", grant.keys)
    return f"({' '.join([*(f'{mark}{prefix}{suffix}' for suffix in _once(suffixes)), *_allowed(grant.commands)])})"


def _allowed(commands: str) -> list[str]:
    return [f"+{command}" for command in _once(commands)]


def _once(words: str) -> Iterable[str]:
    return sorted(set(words.split()))

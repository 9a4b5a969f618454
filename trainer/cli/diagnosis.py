"""What `doctor` makes of what it saw: findings, each with a remedy where something is not as it should be. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...broker.inspection import RunState
from ...broker.keys import GROUP_NAME
from ...broker.settings import BrokerSettings
from ...broker.wording import counted
from .console import seconds, size

Level = Literal["ok", "unknown", "warning", "wrong"]

# Streams that stay on purpose.
_KEPT = ("dead", "events")
_CLOCK_TOLERANCE_S = 1.0
_SLOW_ANSWER_S = 0.05
_SHORT_IDLE_S = 30
# A read of results takes 8 MB and one entry more, which may be large.
_ROOM_FOR_A_READ = 32 << 20
_CLIENTS_HIGH_RATIO = 0.9

# What INFO does not tell.
SETTINGS_READ = ("timeout", "appendfsync", "min-replicas-to-write", "client-output-buffer-limit")


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it where it is not ok."""

    check: str
    level: Level
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class KeyFact:
    """One key that begins with `rolloutbus:`. `ttl_ms` is -1 for one that never expires."""

    name: str
    kind: str
    ttl_ms: int


def check_server(
    info: Mapping[str, str], config: Mapping[str, str] | None, settings: BrokerSettings
) -> Iterator[Finding]:
    """Version, role, persistence, eviction, memory, connections. `config` is None where the broker does not let us read
    it.
    """
    yield _version(info)
    yield from _role(info)
    yield from _replicas(info, config)
    yield _persistence(info, config)
    yield _eviction(info)
    yield _memory(info, settings)
    yield _idle(config)
    yield from _reply_limit(config)
    yield from _connections(info)
    if info.get("cluster_enabled") == "1":
        yield Finding(
            "cluster", "warning", "the server is a node of a cluster, and rolloutbus follows no redirections",
            "give the URL of the node that has the run's slot (all keys of a run share one)",
        )  # fmt: skip


def _version(info: Mapping[str, str]) -> Finding:
    valkey = info.get("valkey_version")
    named = f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', 'unknown')}"
    return Finding("server version", "ok", f"{named}, up {seconds(float(info.get('uptime_in_seconds', 0)))}")


def _role(info: Mapping[str, str]) -> Iterator[Finding]:
    if info.get("role", "master") == "master":
        return
    primary = f"{info.get('master_host', 'its primary')}:{info.get('master_port', '?')}"
    what = "nothing can be written to it" if info.get("slave_read_only") != "0" else "what is written to it is lost"
    yield Finding("role", "wrong", f"a replica of {primary}: {what}", f"give the URL of {primary}")


def _replicas(info: Mapping[str, str], config: Mapping[str, str] | None) -> Iterator[Finding]:
    """INFO counts good replicas only where some are asked for, but does not say how many."""
    if "min_slaves_good_slaves" not in info:
        return
    good, check = int(info["min_slaves_good_slaves"]), "replicas"
    if config is None:
        yield _not_told(check, "min-replicas-to-write", f"writes need replicas and {good} are good; ")
    elif good < int(config.get("min-replicas-to-write", 0)):
        yield Finding(
            check, "wrong", f"{good} of the {config['min-replicas-to-write']} replicas without which it refuses writes",
            "start the replicas or mend their link, or CONFIG SET min-replicas-to-write lower",
        )  # fmt: skip


def _persistence(info: Mapping[str, str], config: Mapping[str, str] | None) -> Finding:
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if info.get(name, "ok") != "ok":
            return Finding(
                "persistence",
                "wrong",
                f"{name} is {info[name]}",
                "free disk space or mend its permissions; see the server's log",
            )
    if info.get("aof_enabled") == "1":
        fsync = (config or {}).get("appendfsync", "")
        what = "append-only file" + (f", fsync {fsync}" if fsync else "")
        if fsync == "no":
            return Finding(
                "persistence",
                "warning",
                f"{what}: a power cut loses up to half a minute",
                "CONFIG SET appendfsync everysec",
            )
        return Finding("persistence", "ok", what)
    return Finding(
        "persistence", "warning", "no append-only file: a restart loses open batches; trainers publish them again",
        "CONFIG SET appendonly yes (and appendfsync everysec), unless that is wanted",
    )  # fmt: skip


def _eviction(info: Mapping[str, str]) -> Finding:
    policy = info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return Finding("eviction policy", "ok", policy)
    return Finding(
        "eviction policy", "wrong", f"{policy}: a full broker deletes keys, and rows are lost without a word",
        "CONFIG SET maxmemory-policy noeviction, and the same in its config file",
    )  # fmt: skip


def _memory(info: Mapping[str, str], settings: BrokerSettings) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        machine = int(info.get("total_system_memory", 0))
        of = f" of the machine's {size(machine)}" if machine else ""
        return Finding(
            "memory headroom", "warning",
            f"no maxmemory; {size(used)}{of} used: the kernel may kill it before publishing stops",
            "CONFIG SET maxmemory to what the broker may use, below the machine's memory",
        )  # fmt: skip
    what = f"{size(used)} of {size(limit)} used ({used / limit:.0%})"
    if used < settings.memory_high_ratio * limit:
        return Finding("memory headroom", "ok", what)
    return Finding(
        "memory headroom", "wrong", f"{what}: publishing waits above {settings.memory_high_ratio:.0%}",
        "raise maxmemory, let trainers consume, cancel batches that nobody wants (`rolloutbus status`), or drop "
        "dead letters (`rolloutbus dead list`, `dead drop`)",
    )  # fmt: skip


def _idle(config: Mapping[str, str] | None) -> Finding:
    if config is None:
        return _not_told("idle connections", "timeout")
    timeout = int(config.get("timeout", 0))
    if 0 < timeout < _SHORT_IDLE_S:
        return Finding(
            "idle connections", "warning",
            f"connections idle for {timeout} s are closed: clients reconnect all the time",
            f"CONFIG SET timeout 0, or at least {_SHORT_IDLE_S}",
        )  # fmt: skip
    return Finding("idle connections", "ok", f"closed after {timeout} s" if timeout else "never closed by the server")


def _not_told(check: str, setting: str, known: str = "") -> Finding:
    what, remedy = f"{known}CONFIG GET is not allowed for this user", f"ask the broker's owner for `{setting}`"
    return Finding(check, "unknown", what, remedy)


def _reply_limit(config: Mapping[str, str] | None) -> Iterator[Finding]:
    """The setting is `class hard soft seconds`, one after the other; clients that read results are `normal`."""
    if config is None:
        yield _not_told("reply size", "client-output-buffer-limit")
    words = (config or {}).get("client-output-buffer-limit", "").split()
    if "normal" not in words:
        return
    hard, soft, soft_s = (int(word) for word in words[words.index("normal") + 1 :][:3])
    check, remedy = (
        "reply size",
        "CONFIG SET client-output-buffer-limit 'normal 0 0 0', and the same in its config file",
    )
    if 0 < hard < _ROOM_FOR_A_READ:
        what = f"a client with {size(hard)} of replies is cut off, and one read of results may be larger"
        yield Finding(check, "wrong", what, remedy)
    elif 0 < soft < _ROOM_FOR_A_READ:
        what = f"a client with {size(soft)} of replies for {soft_s} s is cut off, which a slow network may cause"
        yield Finding(check, "warning", what, remedy)


def _connections(info: Mapping[str, str]) -> Iterator[Finding]:
    there, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    if most and there >= _CLIENTS_HIGH_RATIO * most:
        yield Finding(
            "connections", "warning", f"{there} of at most {most}; the next are refused",
            "CONFIG SET maxclients higher, and see CLIENT LIST for who holds them",
        )  # fmt: skip


def check_settings(settings: BrokerSettings) -> Finding:
    """Whether one slow answer or one blocked read could cost a lease."""
    at = "rolloutbus.broker"
    if settings.renew_every_s * 3 > settings.lease_s:
        every = f"{settings.renew_every_s:g} s"
        what = f"{at}.lease_s is {settings.lease_s:g} and renewals come every {every}: one lost renewal loses the lease"
        return Finding("timeouts", "wrong", what, f"set {at}.lease_s to at least three times {at}.renew_every_s")
    if settings.command_timeout_s >= settings.lease_s or settings.block_s >= settings.lease_s:
        times = f"command_timeout_s {settings.command_timeout_s:g} or block_s {settings.block_s:g}"
        what = f"{times} is not below lease_s {settings.lease_s:g}"
        return Finding(
            "timeouts", "wrong", what, f"lower {at}.command_timeout_s and {at}.block_s, or raise {at}.lease_s"
        )
    reads = f"reads block {settings.block_s:g} s and time out after {settings.block_s + 2:g}"
    what = f"{reads}, commands {settings.command_timeout_s:g}, lease {settings.lease_s:g} s"
    return Finding("timeouts", "ok", what)


def check_clock(offset_s: float, round_trip_s: float, here: str, states: Sequence[RunState]) -> Iterator[Finding]:
    """`offset_s`: the broker's clock minus this machine's. Instances on this machine share its clock, those elsewhere
    tell none.
    """
    hosts = {instance.host for state in states for shard in state.shards for instance in shard.instances}
    elsewhere = f"; not known for {', '.join(sorted(hosts - {here}))}" if hosts - {here} else ""
    who = "this machine and the workers on it" if here in hosts else "this machine"
    what = f"{abs(offset_s):.3f} s {'ahead of' if offset_s >= 0 else 'behind'} {who}{elsewhere}"
    if abs(offset_s) > _CLOCK_TOLERANCE_S + round_trip_s:
        yield Finding(
            "broker's clock",
            "warning",
            what,
            "run NTP on both; leases are safe (they use the broker's time alone), log times are not",
        )
    else:
        yield Finding("broker's clock", "ok", what)
    slow = round_trip_s > _SLOW_ANSWER_S
    remedy = "look for slow commands (SLOWLOG GET), swapping, or a broker that is far away" if slow else ""
    yield Finding("answer time", "warning" if slow else "ok", f"{round_trip_s * 1000:.1f} ms", remedy)


def check_keys(keys: Sequence[KeyFact], prefixes: Sequence[str]) -> Iterator[Finding]:
    """Hash tags and lifetimes."""
    stray = [key.name for key in keys if not any(key.name.startswith(prefix) for prefix in prefixes)]
    if stray:
        what = f"{_some(stray)} has no run's hash tag: steps of a run need one slot"
        yield Finding("hash tags", "wrong", what, "no process of rolloutbus made it; find out who did, and delete it")
    else:
        yield Finding("hash tags", "ok", f"all {len(keys)} keys carry their run's")
    suffixes = {
        key.name: next((key.name.removeprefix(p) for p in prefixes if key.name.startswith(p)), "") for key in keys
    }
    eternal = [
        key.name for key in keys if key.ttl_ms == -1 and suffixes[key.name] not in _KEPT and key.name not in stray
    ]
    if eternal:
        yield Finding(
            "expiry",
            "wrong",
            f"{_some(eternal)} never expires",
            "if no process of its run lives, delete it; else report it",
        )


def check_groups(missing: Sequence[str]) -> Iterator[Finding]:
    """Streams of work without their consumer group."""
    if missing:
        what = f"{_some(missing)} has no consumer group {GROUP_NAME!r}: nobody can read it"
        yield Finding("consumer groups", "wrong", what, f"XGROUP CREATE <stream> {GROUP_NAME} 0")


def check_run(state: RunState, settings: BrokerSettings) -> Iterator[Finding]:
    """Runs that nobody looks after, shards without instances, batches without a client, dead letters."""
    check, batches = f"run {state.run}", batches_of(state)
    alive = sum(len(shard.instances) for shard in state.shards)
    gone = [
        batch.batch
        for batch in state.open_batches
        if batch.client_seen_s is None or batch.client_seen_s > settings.lease_s
    ]
    unhosted = [shard.shard for shard in state.shards if shard.unfinished and not shard.instances]
    if not state.fleet and not alive and (state.batches or state.shards):
        yield Finding(
            check, "wrong",
            f"stale: no fleet, no instance, but {batches} and {counted(len(state.shards), 'shard')}",
            "start its fleet again (`rolloutbus up`), or cancel its batches; left alone, its keys expire in "
            f"{seconds(settings.key_ttl_s)}",
        )  # fmt: skip
    elif unhosted:
        yield Finding(
            check,
            "wrong",
            f"{_some(unhosted)} has work and no instance",
            "see the fleet's log, or `rolloutbus scale SHARD N`",
        )
    elif gone:
        what = f"batch {_some(gone)} has lost its client"
        yield Finding(
            check, "wrong", what, "`client.resume(batch)`, or `rolloutbus cancel BATCH`; workers drop it in time"
        )
    else:
        what = (
            f"{counted(alive, 'instance')}, {batches}"
            if alive or state.batches
            else "over; only its events and letters are left"
        )
        yield Finding(check, "ok", what)
    if state.unreadable:
        remedy = "no process of rolloutbus wrote it so; find out who did, and delete it or start the fleet again"
        yield Finding(check, "wrong", f"cannot be read: {_some(state.unreadable)}", remedy)
    if state.dead_letters:
        remedy = f"`rolloutbus dead list --run {state.run}`, then `dead replay` or `dead drop`"
        yield Finding(check, "warning", counted(state.dead_letters, "dead letter"), remedy)


def batches_of(state: RunState) -> str:
    """How many batches go on, and how many were cancelled and are still there."""
    closed = f", {len(state.closed_batches)} closed" if state.closed_batches else ""
    return counted(len(state.open_batches), "open batch", "open batches") + closed


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

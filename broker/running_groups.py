"""Which group of each shard has run for longest: where to look first when a step does not end.

Told from batches' hashes as they were read, without a question of its own. A group's age is counted from its first
take, over all its attempts, because its deadline is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .group_record import GroupRecord, parse_group_record
from .shard_records import shard_of_label

_GROUP_FIELD = "g:"


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """`instance` has it, and shows signs of life or not. `running_s` counts from its first take, `deadline_s` is what
    is left of `group_timeout_s`, below 0 once that is over, None where the shard has no record.
    """

    batch: str
    group: int
    instance: str
    instance_alive: bool
    attempt: int
    rows: int
    accepted_rows: int
    first_take_ms: int
    running_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Hosting:
    """What is known of instances and shards: the shard of each living instance, the time that a shard gives a group."""

    shard_of_instance: Mapping[str, str]
    timeout_s: Mapping[str, float | None]

    def shard(self, instance: str) -> str:
        return self.shard_of_instance.get(instance) or shard_of_label(instance)


def longest_running(
    batches: Mapping[str, Mapping[str, str]], hosting: Hosting, now_s: float
) -> dict[str, RunningGroup]:
    """Shard → the one of its running groups that was taken first; `batches` are hashes by id."""
    oldest: dict[str, tuple[int, str, int, GroupRecord]] = {}
    for batch, fields in batches.items():
        # Nobody runs on what was cancelled, whatever its records say.
        for group, record in _running(fields) if fields.get("state") != "closed" else ():
            shard, found = hosting.shard(record.instance), (record.first_take_ms, batch, group, record)
            oldest[shard] = min(oldest.get(shard, found), found, key=lambda of_one: of_one[:3])
    return {
        shard: _told(batch, group, record, batches[batch], hosting, now_s)
        for shard, (_, batch, group, record) in oldest.items()
    }


def _running(fields: Mapping[str, str]) -> Iterator[tuple[int, GroupRecord]]:
    for name, value in fields.items():
        group = name.removeprefix(_GROUP_FIELD)
        if name.startswith(_GROUP_FIELD) and value.startswith("running ") and group.isdecimal():
            record = parse_group_record(value.encode())
            if record is not None and record.first_take_ms:
                yield int(group), record


def _told(
    batch: str, group: int, record: GroupRecord, fields: Mapping[str, str], hosting: Hosting, now_s: float
) -> RunningGroup:
    running_s = max(0.0, now_s - record.first_take_ms / 1000)
    timeout_s = hosting.timeout_s.get(hosting.shard(record.instance))
    rows = 0
    with contextlib.suppress(ValueError):
        rows = int(fields.get("group_size", 0))
    return RunningGroup(
        batch=batch,
        group=group,
        instance=record.instance,
        instance_alive=record.instance in hosting.shard_of_instance,
        attempt=record.attempt,
        rows=rows,
        accepted_rows=record.accepted_rows,
        first_take_ms=record.first_take_ms,
        running_s=running_s,
        deadline_s=None if timeout_s is None else timeout_s - running_s,
    )

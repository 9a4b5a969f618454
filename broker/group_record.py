"""A group's record on the broker: one field of the batch hash, `g:<group>`, see prelude.lua."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Where a group stands now. `idle_s`: seconds since its lease was renewed, None unless it runs; `first_take_ms` is
    0 before.
    """

    status: str
    attempt: int
    instance: str
    entry: str
    infra_failures: int
    data_failures: int
    accepted_rows: int
    first_take_ms: int
    idle_s: float | None = None


def parse_group_record(raw: bytes) -> GroupRecord | None:
    """The record, None for what nobody of ours wrote; its token stays here."""
    try:
        status, attempt, _, instance, entry, infra, data, accepted, _, first_take = raw.decode().split(" ")
        return GroupRecord(status, int(attempt), instance, entry, int(infra), int(data), int(accepted), int(first_take))
    except ValueError:
        return None

"""A group's record on the broker: one field of the batch hash, `g:<group>`, see prelude.lua."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# The last millisecond that is a date, year 9999. What is counted stays below it too.
MOST: Final = 253_402_300_799_000
ENDED: Final = frozenset({"done", "handed", "failed", "abandoned"})
# What a group is that is out and that nobody runs, for whoever waits for it.
WAITING: Final[Mapping[str, str]] = {
    "queued": "not taken",
    "parked": "put aside until the consumer takes what has come",
    "delayed": "waiting for a retry",
    "suspect": "waiting for a last attempt",
}


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Where a group stands now. `idle_s`: seconds since its lease was renewed, None unless it runs; `first_take_ms` is
    0 before; `told`: it failed, and the trainer has had its failure.
    """

    status: str
    attempt: int
    instance: str
    entry: str
    infra_failures: int
    data_failures: int
    accepted_rows: int
    first_take_ms: int
    told: bool = False
    idle_s: float | None = None


def plain_number(text: str | bytes, least: int = 0) -> int:
    """A count, size or time as the scripts write it; raises `ValueError` for what is none, or none that can be."""
    number = int(text)
    if not least <= number <= MOST:
        raise ValueError(f"{text[:40]!r} is no number of ours")
    return number


def parse_group_record(raw: bytes) -> GroupRecord | None:
    """The record, None for what nobody of ours wrote; its token stays here."""
    try:
        status, attempt, token, instance, entry, infra, data, accepted, _, first_take = raw.decode().split(" ")
        told = status == "failed" and token == "told"
        counts = plain_number(infra), plain_number(data), plain_number(accepted), plain_number(first_take)
        return GroupRecord(status, plain_number(attempt), instance, entry, *counts, told)
    except ValueError:
        return None

"""What a trainer gets: whole groups with their results, or the failure of one, never an invented result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..broker.errors import GroupFailedError
from ..broker.messages import Failure


class Origin(NamedTuple):
    """Where a row was rolled out."""

    instance: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """A prompt group. `rows` are the caller's own, `results` and `origins` stand in the same order."""

    group_id: str
    group_index: int
    rows: Sequence[dict[str, Any]]
    results: Sequence[Any]
    origins: Sequence[Origin]


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A group that failed for good: which rows it was, and why."""

    group_id: str
    group_index: int
    row_indices: Sequence[int]
    failure_class: str
    type: str
    message: str
    traceback: str
    instance: str
    attempt: int
    http_status: int | None = None

    @classmethod
    def of(cls, group_id: str, group_index: int, row_indices: Sequence[int], failure: Failure) -> GroupFailure:
        return cls(
            group_id, group_index, row_indices, failure.failure_class, failure.type, failure.message, failure.traceback,
            failure.instance, failure.attempt, failure.http_status,
        )  # fmt: skip

    def error(self) -> GroupFailedError:
        """The failure as the error that `on_failure="raise"` raises."""
        first, last = self.row_indices[0], self.row_indices[-1]
        where = f" on {self.instance}, attempt {self.attempt}" if self.instance else ""
        return GroupFailedError(
            f"group {self.group_index} (rows {first} to {last}) failed for good{where}: {self.type}: {self.message}. "
            'Use on_failure="yield" to go on without it; `rolloutbus dead list` keeps it'
        )

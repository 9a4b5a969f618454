"""What a trainer gets: whole groups with their results, or the failure of one, never an invented result."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..broker import codec
from ..broker.errors import DecodeError, GroupFailedError, UnreadableResultError
from ..broker.messages import Failure

_FRAME = re.compile(r'^ *File "(?:.*[/\\])?([^"]+)", line (\d+), in (\S+)', re.MULTILINE)


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


class PackedRow(NamedTuple):
    """A row's result as it came. Whoever takes it unpacks it: what waits stays small, and numbers are made where they
    are used, and live no longer than that.
    """

    batch: str
    row_index: int
    origin: Origin
    payload: memoryview

    def opened(self) -> tuple[int, Any]:
        """The row's index and result; raises `UnreadableResultError`."""
        try:
            result = codec.decode(self.payload)
        except DecodeError as error:
            raise self._unreadable(f"cannot be read: {error}") from None
        if result is None:
            raise self._unreadable("is None; let the environment give a value")
        return self.row_index, result

    def _unreadable(self, why: str) -> UnreadableResultError:
        origin = f" of batch {self.batch}, from {self.origin.instance}, attempt {self.origin.attempt},"
        return UnreadableResultError(self.row_index, origin, why)


class PackedGroup(NamedTuple):
    """A whole group with its results as they came."""

    batch: str
    group_index: int
    rows: Sequence[dict[str, Any]]
    payloads: Sequence[memoryview]
    origins: Sequence[Origin]

    def opened(self) -> CompletedGroup:
        """The group for its taker; raises `UnreadableResultError`."""
        first = self.group_index * len(self.payloads)
        packed = zip(itertools.count(first), self.origins, self.payloads, strict=False)
        results = [PackedRow(self.batch, *row).opened()[1] for row in packed]
        return CompletedGroup(f"{self.batch}:{self.group_index}", self.group_index, self.rows, results, self.origins)


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

    @property
    def sentence(self) -> str:
        """Which group failed where, and of what."""
        first, last = self.row_indices[0], self.row_indices[-1]
        return f"group {self.group_index} (rows {first} to {last}) failed for good{self.account}"

    @property
    def account(self) -> str:
        """Where it was, what it was, and the line of code that raised it."""
        where = f" on {self.instance}, attempt {self.attempt}" if self.instance else ""
        frames = _FRAME.findall(self.traceback)
        line = " ({}, line {}, in {})".format(*frames[-1]) if frames else ""
        return f"{where}: {self.type}: {self.message}{line}"

    def error(self) -> GroupFailedError:
        """The failure as the error that `on_failure="raise"` raises."""
        error = GroupFailedError(
            f'{self.sentence}. Use on_failure="yield" to go on without it; `rolloutbus dead list` keeps it'
        )
        self.explain(error)
        return error

    def explain(self, error: BaseException) -> None:
        """Have `error` show, where it is printed, what was raised in the environment."""
        if self.traceback:
            error.add_note(f"In the environment of {self.instance}:\n{self.traceback}")

"""One batch on its way back: rows become groups, groups are handed on in completion order, books are kept.

A row counts once, whatever comes again after a broker's restart. A group's entries stay on the broker until the trainer
asks for what comes after it, so that a trainer that dies gets it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..broker.errors import BatchCancelledError, BatchError
from ..broker.intervals import IntervalUnion
from ..broker.messages import Failure, ForeignEntryError, ResultEntry, unframe
from .accumulator import PromptGroupAccumulator
from .groups import GroupFailure, Origin, PackedGroup, PackedRow
from .timing import TimingLedger

log = logging.getLogger("rolloutbus.collector")

GroupOutcome = PackedGroup | GroupFailure


@dataclass(slots=True)
class Sink:
    """Where a batch's outcomes go. `on_row(row, group it completes or None)` is called as rows come, where rows are
    wanted.
    """

    on_group: Callable[[GroupOutcome], None]
    on_error: Callable[[BaseException], None]
    on_row: Callable[[PackedRow, int | None], None] | None = None
    is_over: Callable[[], bool] = bool


@dataclass(slots=True)
class _Incoming:
    """One group's entries on the broker, and where its rows came from."""

    entries: dict[str, int] = field(default_factory=dict[str, int])
    origins: dict[int, Origin] = field(default_factory=dict[int, Origin])
    since: float = 0.0


class Handover(NamedTuple):
    """Entries of groups that the trainer has: they may go."""

    batch: str
    shard: str
    groups: Sequence[int]
    # Entry id → bytes of its payload, which count as unread until it is deleted.
    entries: Mapping[str, int]


class BatchCollection:
    """Collects the batch `batch`: `rows` in input order, groups of `num_generations`, `shards[group]` the shard of
    each.
    """

    def __init__(
        self, batch: str, rows: Sequence[dict[str, Any]], num_generations: int, shards: Sequence[str], sink: Sink
    ) -> None:
        self.batch = batch
        self.timing = TimingLedger()
        self.completed = 0
        self.duplicate_rows = 0
        self.last_progress = time.monotonic()
        self.collecting = IntervalUnion()
        self._rows = rows
        self._size = num_generations
        self.shards = shards
        self._sink = sink
        self._accumulator = PromptGroupAccumulator(rows, num_generations, allow_mixed_routes=True)
        self._incoming: dict[int, _Incoming] = {}
        self._handed: set[int] = set()
        self._failed: set[int] = set()

    @property
    def failed(self) -> int:
        """How many groups failed for good."""
        return len(self._failed)

    @property
    def groups(self) -> int:
        return len(self.shards)

    @property
    def all_ended(self) -> bool:
        return self._accumulator.is_complete

    def ended(self, group: int) -> bool:
        return self._accumulator.has_ended(group)

    def unfinished(self) -> list[int]:
        """Groups of which something is still to come."""
        return [group for group in range(self.groups) if not self._accumulator.has_ended(group)]

    def outcomes(self) -> dict[int, str]:
        """The groups that have ended: handed or told (the trainer has its results, or its failure), done or failed."""
        return {group: self._outcome(group) for group in range(self.groups) if self._accumulator.has_ended(group)}

    def _outcome(self, group: int) -> str:
        if group in self._failed:
            return "told" if group in self._handed else "failed"
        return "handed" if group in self._handed else "done"

    def skip(self, group: int, *, completed: bool = False, failed: bool = False) -> None:
        """A group that ended before this process's time (resume): it does not come again."""
        self._accumulator.give_up(group)
        self.completed += completed
        if failed:
            self._failed.add(group)
        self._handed.add(group)

    def add(self, entry: ResultEntry) -> list[Handover]:
        """Take one entry in; returns what may be deleted at once because the trainer had it before."""
        if entry.kind == "cancelled":
            self.cancelled(entry.payload)
            return []
        if not 0 <= entry.group < self.groups:
            raise ForeignEntryError(
                f"entry {entry.entry} names group {entry.group} of batch {self.batch}, which has {self.groups}"
            )
        self._check_rows(entry)
        if entry.group in self._handed:
            # It came again after the broker lost its deletion, and counts as unread there.
            return [Handover(self.batch, self.shards[entry.group], [], {entry.entry: len(entry.payload)})]
        incoming = self._incoming.setdefault(entry.group, _Incoming(since=time.monotonic()))
        if entry.entry in incoming.entries:
            return []
        incoming.entries[entry.entry] = len(entry.payload)
        self.last_progress = time.monotonic()
        if entry.kind == "failed":
            self._fail(entry)
        else:
            self._add_rows(entry, incoming)
        return []

    def _check_rows(self, entry: ResultEntry) -> None:
        mine = range(entry.group * self._size, (entry.group + 1) * self._size)
        indices = entry.row_indices
        if min(indices) < mine.start or max(indices) >= mine.stop or len(set(indices)) < len(indices):
            raise ForeignEntryError(
                f"entry {entry.entry} names rows {entry.row_indices} of group {entry.group} of batch {self.batch}, "
                f"which has rows {mine.start} to {mine.stop - 1}"
            )

    def _add_rows(self, entry: ResultEntry, incoming: _Incoming) -> None:
        origin = Origin(entry.instance, entry.attempt)
        try:
            results = unframe(entry.payload)
            if len(results) != len(entry.row_indices):
                raise ForeignEntryError(f"it holds {len(results)} results for {len(entry.row_indices)} rows")
            self.timing.note(entry.instance, entry.timing)
        except ForeignEntryError as error:
            self._sink.on_error(
                BatchError(f"the results of group {entry.group} (entry {entry.entry}) cannot be read: {error}")
            )
            return
        if self._sink.on_row is None and self._add_whole(entry, results, origin, incoming):
            return
        for row_index, result in zip(entry.row_indices, results, strict=True):
            self._add_row(row_index, result, origin, incoming)

    def _add_whole(self, entry: ResultEntry, results: list[memoryview], origin: Origin, incoming: _Incoming) -> bool:
        """The short way of a group whose rows come together and in order."""
        first = entry.group * self._size
        in_order = entry.row_indices == tuple(range(first, first + self._size))
        if not in_order or not self._accumulator.add_group(entry.group, results):
            return False
        self._complete(entry.group, results, [origin] * self._size, incoming)
        return True

    def _add_row(self, row_index: int, result: memoryview, origin: Origin, incoming: _Incoming) -> None:
        if self._accumulator.has(row_index):
            self.duplicate_rows += 1
            return
        incoming.origins[row_index] = origin
        results = self._accumulator.add(row_index, result)
        if self._sink.on_row is not None:
            row = PackedRow(self.batch, row_index, origin, result)
            self._sink.on_row(row, None if results is None else row_index // self._size)
        if results is not None:
            group = row_index // self._size
            first = group * self._size
            origins = [incoming.origins[index] for index in range(first, first + self._size)]
            self._complete(group, results, origins, incoming)

    def _complete(self, group: int, results: list[memoryview], origins: list[Origin], incoming: _Incoming) -> None:
        self.completed += 1
        first = group * self._size
        for label in {origin.instance for origin in origins}:
            self.timing.count_group(label)
        self.collecting.add(incoming.since, time.monotonic())
        rows = self._rows[first : first + self._size]
        self._sink.on_group(PackedGroup(self.batch, group, rows, results, origins))

    def _fail(self, entry: ResultEntry) -> None:
        if self._accumulator.has_ended(entry.group):
            return
        self.fail(entry.group, Failure.unpacked(entry.payload))

    def fail(self, group: int, failure: Failure) -> None:
        """The group failed for good."""
        if self._accumulator.has_ended(group):
            return
        self._failed.add(group)
        self._accumulator.give_up(group)
        first = group * self._size
        indices = range(first, first + self._size)
        self._sink.on_group(GroupFailure.of(f"{self.batch}:{group}", group, indices, failure))

    def cancelled(self, reason: bytes) -> None:
        """An operator ended the batch."""
        told = reason.decode(errors="replace") or "no reason given"
        self.error(BatchCancelledError(f"batch {self.batch} was cancelled by an operator: {told}"))

    def error(self, error: BaseException) -> None:
        """The batch cannot go on."""
        self._sink.on_error(error)

    def start_over(self) -> None:
        """All results are read again, from a broker that may have lost its last second: what came of groups that are
        not complete is dropped, or their other rows could be of another attempt. Rows that the caller has are kept.
        """
        if self._sink.on_row is None:
            self._accumulator.start_over()
            self._incoming = {at: got for at, got in self._incoming.items() if self._accumulator.has_ended(at)}

    def hand_over(self, groups: Sequence[int]) -> list[Handover]:
        """The trainer has these groups; what of them may be deleted on the broker, by shard."""
        by_shard: dict[str, list[int]] = {}
        for group in groups:
            if group not in self._handed:
                by_shard.setdefault(self.shards[group], []).append(group)
        self._handed.update(groups)
        return [self._handover(shard, members) for shard, members in by_shard.items()]

    def leftovers(self) -> list[Handover]:
        """Once the batch is over: all its entries that nobody will have."""
        by_shard: dict[str, dict[str, int]] = {}
        for group, incoming in self._incoming.items():
            by_shard.setdefault(self.shards[group], {}).update(incoming.entries)
        self._incoming.clear()
        return [Handover(self.batch, shard, [], entries) for shard, entries in by_shard.items()]

    def _handover(self, shard: str, groups: list[int]) -> Handover:
        entries = {
            entry: size
            for group in groups
            if group in self._incoming
            for entry, size in self._incoming.pop(group).entries.items()
        }
        return Handover(self.batch, shard, groups, entries)

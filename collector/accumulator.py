"""Putting rows back into prompt groups. Pure: it never learns that shards exist, only `_rowidx` counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..broker.errors import BatchError, RouteError, RowError, RowTypeError
from ..broker.routes import route_of


class MissingRowsError(BatchError):
    """The batch ended and rows never came; `row_indices` names them all."""

    def __init__(self, row_indices: Sequence[int]) -> None:
        self.row_indices = tuple(row_indices)
        shown = ", ".join(map(str, self.row_indices[:20])) + (", …" if len(self.row_indices) > 20 else "")
        super().__init__(f"{len(self.row_indices)} rows have no result: {shown}")


class PromptGroupAccumulator:
    """Collects results of a batch in any order; groups complete in completion order, their results in input order.

    `rows` are the batch's N rows in input order, N a multiple of `num_generations`. `add` raises `RowTypeError` for an
    index that is no integer, `RowError` for one outside 0..N-1, for a repeated row, and for a result that is None.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], num_generations: int, allow_mixed_routes: bool = False
    ) -> None:
        if num_generations <= 0 or not rows or len(rows) % num_generations:
            raise RowError(f"{len(rows)} rows cannot be cut into groups of {num_generations}")
        # Not the rows themselves: a list that its owner empties meanwhile must not change what belongs to the batch.
        self._count = len(rows)
        self._size = num_generations
        self._results: dict[int, dict[int, Any]] = {}
        self._ended = bytearray(len(rows) // num_generations)
        self._open = len(self._ended)
        if not allow_mixed_routes:
            self._check_routes(rows)

    def _check_routes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for first in range(0, len(rows), self._size):
            routes = {route_of(row) for row in rows[first : first + self._size]}
            if len(routes) > 1:
                raise RouteError(f"the group that begins at row {first} mixes routes: {', '.join(sorted(routes))}")

    @property
    def is_complete(self) -> bool:
        """Whether every group is complete, or was given up."""
        return self._open == 0

    def has(self, row_index: int) -> bool:
        """Whether this row's result is there, or its group has ended."""
        group = row_index // self._size
        return bool(self._ended[group]) or row_index in self._results.get(group, ())

    def has_ended(self, group: int) -> bool:
        return bool(self._ended[group])

    def add(self, row_index: int, result: Any) -> list[Any] | None:
        """Add one row's result; gives the group's results in input order when it was the last one of its group."""
        if type(row_index) is not int:
            raise RowTypeError(f"a row index must be an integer, but is {row_index!r}")
        if not 0 <= row_index < self._count:
            raise RowError(f"row index {row_index} is outside this batch of {self._count} rows")
        if result is None:
            raise RowError(f"row {row_index} came back with None; a result must be a value")
        if self.has(row_index):
            raise RowError(f"row {row_index} came back twice")
        group = row_index // self._size
        results = self._results.setdefault(group, {})
        results[row_index] = result
        if len(results) < self._size:
            return None
        return [results[index] for index in sorted(self._end(group))]

    def add_group(self, group: int, results: list[Any]) -> bool:
        """Add all results of a group that nothing has come of yet, in input order; False, and nothing is added, where
        they must be looked at one by one.
        """
        untouched = not self._ended[group] and group not in self._results and len(results) == self._size
        if not untouched or any(result is None for result in results):
            return False
        self._end(group)
        return True

    def give_up(self, group: int) -> None:
        """The group failed: its rows will not come, and what came of it is dropped."""
        if not self._ended[group]:
            self._end(group)

    def start_over(self) -> None:
        """Drop what came of groups that are not complete."""
        self._results.clear()

    def _end(self, group: int) -> dict[int, Any]:
        self._ended[group] = 1
        self._open -= 1
        return self._results.pop(group, {})

    def missing(self) -> list[int]:
        """The rows whose result is not there, in input order."""
        return [
            index
            for group, ended in enumerate(self._ended)
            if not ended
            for index in range(group * self._size, (group + 1) * self._size)
            if index not in self._results.get(group, ())
        ]

    def finish(self) -> None:
        """Say that no more results come; raises `MissingRowsError` naming exactly the rows that are missing."""
        missing = self.missing()
        if missing:
            raise MissingRowsError(missing)

"""The contract between a shard worker and whatever turns rows into scored rollouts.

An environment promises completion order, one outcome per row, and that a closed iterator leaves no task of
it behind. The worker promises that the rows of one call belong to one prompt group, and that `start` comes
before everything but `stop`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

Row: TypeAlias = dict[str, Any]
Result: TypeAlias = dict[str, Any]
RowOutcome: TypeAlias = tuple[Row, Result | BaseException]


@runtime_checkable
class Environment(Protocol):
    """What a shard worker hosts; any class with these methods will do, no base class is needed."""

    async def start(self, config: Mapping[str, Any]) -> None:
        """Build the whole stack from the shard's merged config; may take minutes, raises when it cannot be
        built.
        """
        ...

    def list_entries(self) -> dict[str, list[str]]:
        """Give `{entry: [server type, …]}` of what this environment hosts, once it is started."""
        ...

    def run_rollouts(self, rows: Sequence[Row]) -> AsyncIterator[RowOutcome]:
        """Run the rows of one prompt group and yield `(row, result)` as each completes.

        The row that is yielded is the very object that was given. An exception in place of a result is that
        row's failure, and its siblings go on; raising fails every row that was not yielded yet. On a shard
        with `rerun: missing` the rows may be a part of their group. Each row carries `_group_id`, which no
        other batch, group or attempt has; several calls run side by side.

        Cancelling the task that reads, or `aclose()` once nothing reads any more, ends every task of the
        call before it returns.

        `SystemExit` and `KeyboardInterrupt` that leave the iterator fail the group like any error. Catch them in tasks
        that you make yourself: asyncio takes them out of the task through the event loop. The loop of a fleet's
        instance goes on after that; under a plain `asyncio.run` the worker ends.
        """
        ...

    async def health(self) -> None:
        """Return when rollouts can run; raise what is wrong otherwise."""
        ...

    async def stop(self) -> None:
        """End everything that was started; safe to call twice and before `start`."""
        ...


@runtime_checkable
class ReportsTiming(Protocol):
    """What an environment has besides when it measures times of its own; optional."""

    def take_timing(self, group_id: str) -> Mapping[str, float]:
        """Seconds by name that the attempt with this `_group_id` spent, given once, after its rows. They are summed
        up per batch, so they must not overlap each other.
        """
        ...

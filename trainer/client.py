"""`RolloutClient`: producer and collector in one, from asyncio or from plain code.

All network work happens in one thread that the client owns, so it may be used from several event loops, one after
another or side by side, and from threads. Connecting is lazy: the object may be made anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ..broker.errors import RouteError, UnknownBatchError, UsageError
from ..broker.messages import ReplayOrigin
from ..broker.settings import BrokerSettings
from ..broker.steps import ask
from ..collector.timing import DEFAULT_PREFIX
from ..producer import (
    PromptGroup,
    begins_with_mixed_prompts,
    check_places,
    check_rows,
    own_rows,
    plan_groups,
    stamp_row_indices,
)
from .arguments import broker_settings, check_batch_id, check_on_failure, check_seconds, check_text
from .batch import Batch, GroupBatch, OnFailure, RowBatch
from .batch_record import StoredBatch
from .engine import Engine
from .same_rows import require_same_rows
from .session import Session, new_session

log = logging.getLogger("rolloutbus.trainer")

DEFAULT_FLEET_WAIT_S = 60.0


class RolloutClient:
    """One trainer's connection to its run: an async context manager, or `connect_now` and `close_now`."""

    def __init__(
        self,
        url: str,
        *,
        run: str,
        client: str = "trainer",
        settings: BrokerSettings | Mapping[str, Any] | None = None,
        timer_prefix: str = DEFAULT_PREFIX,
        fleet_wait_s: float = DEFAULT_FLEET_WAIT_S,
        name_wait_s: float | None = None,
    ) -> None:
        check_text("timer_prefix", timer_prefix)
        check_seconds("fleet_wait_s", fleet_wait_s)
        if name_wait_s is not None:
            check_seconds("name_wait_s", name_wait_s)
        self._prefix = timer_prefix
        self._told_of_mixed_prompts = False
        broker = broker_settings(url, settings)
        self._engine = Engine(broker, run, client, fleet_wait_s=fleet_wait_s, name_wait_s=name_wait_s)

    @classmethod
    def connect(cls, url: str, *, run: str, client: str = "trainer", **options: Any) -> RolloutClient:
        """A client of the broker at `url`, for `async with`. Options: `settings`, `timer_prefix`, `fleet_wait_s`,
        `name_wait_s` (how long to wait for the client's name; by default for a process that died, but for none that
        lives).

        Entering raises `BrokerUnavailableError`, `BrokerAuthError`, `ClientNameTakenError`, or `NoInstanceError` when
        no fleet publishes its routes within `fleet_wait_s` seconds.
        """
        return cls(url, run=run, client=client, **options)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wrap_future(self._engine.start())
        except BaseException:
            self._engine.ask_to_stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def connect_now(self) -> Self:
        """Connect from plain code, blocking; safe when connected."""
        self._engine.start().result()
        return self

    async def close(self) -> None:
        """Cancel open batches, give the client's name up, end the thread. Safe twice."""
        await asyncio.to_thread(self._engine.stop)

    def close_now(self) -> None:
        """`close` for plain code."""
        self._engine.stop()

    def run_groups(
        self, rows: Sequence[dict[str, Any]], num_generations: int, *, on_failure: OnFailure = "raise"
    ) -> GroupBatch:
        """Validate `rows`, stamp `_rowidx`, and start publishing at once; iterate over the result for whole groups.

        The list is the caller's own again when this returns. Its dicts are read while the batch is published, and again
        where a broker lost it: what they hold must not change until the batch is over.

        Raises `RowError`, `RowTypeError` or `RouteError` before anything is published, and `ConfigError` for an unknown
        `on_failure`.
        """
        check_on_failure(on_failure)
        return Batch(self._engine, self._begin(rows, num_generations, rows_mode=False), on_failure, self._prefix)

    def run_rollouts(
        self, rows: Sequence[dict[str, Any]], num_generations: int, *, on_failure: OnFailure = "raise"
    ) -> RowBatch:
        """As `run_groups`, but gives `(row_index, result)` in completion order; failures are `GroupFailure` items where
        yielded.
        """
        check_on_failure(on_failure)
        return Batch(self._engine, self._begin(rows, num_generations, rows_mode=True), on_failure, self._prefix)

    def replay(self, rows: Sequence[dict[str, Any]], origin: ReplayOrigin) -> GroupBatch:
        """Run one dead group again, as a batch of its own whose failure is yielded; if it is buried again, the new
        letter says its `origin`. Raises as `run_groups` does.
        """
        session = self._begin(rows, len(rows), rows_mode=False, origin=origin)
        return Batch(self._engine, session, "yield", self._prefix)

    def _begin(
        self,
        rows: Sequence[dict[str, Any]],
        num_generations: int,
        *,
        rows_mode: bool,
        origin: ReplayOrigin | None = None,
    ) -> Session:
        rows = own_rows(rows)
        check_rows(rows, num_generations)
        self.connect_now()
        groups = self._plan(rows, num_generations)
        stamp_row_indices(rows)
        batch = secrets.token_hex(6)
        session = new_session(batch, rows, groups, num_generations, rows_mode=rows_mode, origin=origin)
        self._warn_of_mixed_prompts(batch, rows, num_generations)
        # Not waited for: a broker that hangs right now must not hold the caller's event loop up.
        self._engine.call(self._engine.sessions.start(session)).add_done_callback(session.note_start)
        return session

    def _warn_of_mixed_prompts(self, batch: str, rows: Sequence[dict[str, Any]], num_generations: int) -> None:
        """Once: some environments may want that."""
        if not self._told_of_mixed_prompts and begins_with_mixed_prompts(rows, num_generations):
            self._told_of_mixed_prompts = True
            log.warning(
                "batch %s: the first %d rows are one group, and their prompts differ; a group is %d rows of a prompt, "
                "side by side: [dict(prompt) for prompt in prompts for _ in range(%d)]",
                batch, num_generations, num_generations, num_generations,
            )  # fmt: skip

    def _plan(self, rows: Sequence[dict[str, Any]], num_generations: int) -> list[PromptGroup]:
        try:
            return plan_groups(rows, self._engine.route_map.routes, num_generations)
        except RouteError:
            # A fleet that was replaced may host it now; asked once, and only when something is missing.
            refreshed = self._engine.call(self._engine.refresh_route_map()).result()
            return plan_groups(rows, refreshed.routes, num_generations)

    async def resume(
        self, batch_id: str, rows: Sequence[dict[str, Any]] | None = None, *, on_failure: OnFailure = "raise"
    ) -> GroupBatch:
        """Continue a sealed batch of this client's former process: groups not yet handed over come again, the rest do
        not.

        Those that were dropped because it stayed away too long come as `GroupFailure` of type `AbandonedError`.

        `rows` are the batch's rows in the order in which they were published, for `CompletedGroup.rows`; they are
        stamped again. They are compared with what was published, by a checksum per group. Without them each row is
        `{"_rowidx": i}`.
        Raises `UnknownBatchError` when it came back too late or the publishing had not finished, and `UsageError` for a
        batch that this client has open, or that is another client's, and for rows other than those published.
        """
        check_on_failure(on_failure)
        check_batch_id(batch_id)
        known = None if rows is None else own_rows(rows)
        check_places(known or ())
        await asyncio.wrap_future(self._engine.start())
        ready: list[Session] = []
        try:
            await asyncio.wrap_future(self._engine.call(self._resume(batch_id, known, ready)))
        except asyncio.CancelledError:
            # It may be open already, and nobody has it: the next `resume` would be refused.
            self._engine.post(self._let_go, ready)
            raise
        return Batch(self._engine, ready[0], on_failure, self._prefix)

    def _let_go(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self._engine.sessions.let_go(session)

    async def _resume(self, batch_id: str, rows: Sequence[dict[str, Any]] | None, ready: list[Session]) -> None:
        (flat,) = await ask(self._engine.link, [("HGETALL", self._engine.keys.batch(batch_id))])
        if not flat:
            raise UnknownBatchError(
                f"batch {batch_id} is not on the broker: it was closed, abandoned after its client stayed away, "
                "or never existed"
            )
        session = await _session_again(batch_id, StoredBatch(batch_id, flat), rows)
        await self._engine.sessions.resume(session)
        ready.append(session)

    @classmethod
    def run_sync(
        cls,
        url: str,
        rows: Sequence[dict[str, Any]],
        num_generations: int,
        *,
        run: str,
        client: str = "trainer",
        on_failure: OnFailure = "raise",
        **options: Any,
    ) -> list[Any]:
        """Run a whole batch from plain code; results in input order. A `GroupFailure` stands in each of its rows'
        places. Raises `UsageError` where an event loop runs, as in a notebook.
        """
        _require_no_loop()
        check_on_failure(on_failure)
        mine = own_rows(rows)
        check_rows(mine, num_generations)

        async def collect() -> list[Any]:
            results: list[Any] = [None] * len(mine)
            async with (
                cls.connect(url, run=run, client=client, **options) as bus,
                bus.run_groups(mine, num_generations, on_failure=on_failure) as batch,
            ):
                async for group in batch:
                    first = group.group_index * num_generations
                    values = getattr(group, "results", None) or [group] * num_generations
                    results[first : first + num_generations] = values
            return results

        return asyncio.run(collect())


def _require_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "run_sync is for plain code, and an event loop runs here, as in a notebook; write "
        "`await asyncio.to_thread(RolloutClient.run_sync, url, rows, num_generations, run=…)`, or use "
        "`async with RolloutClient.connect(…)`"
    )


async def _session_again(batch_id: str, stored: StoredBatch, rows: Sequence[dict[str, Any]] | None) -> Session:
    """The session of a batch as its record on the broker tells it, groups that are over told as such."""
    size, total = stored.record.group_size, stored.record.rows
    known = rows if rows is not None else [{"_rowidx": index} for index in range(total)]
    if len(known) != total:
        raise UsageError(
            f"batch {batch_id} has {total} rows, but {len(known)} were given; give the rows it was published with"
        )
    groups = stored.record.laid_out(rows or ())
    published = stored.record.published_checksums
    if rows is not None:
        await require_same_rows(batch_id, groups, published)
        stamp_row_indices(rows)
    session = new_session(batch_id, known, groups, size, rows_mode=False)
    session.publication.checksums.update(published)
    session.publication.placed.update(range(stored.record.groups))
    stored.tell(session.collection)
    return session

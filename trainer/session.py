"""One batch inside the client's thread: published, collected, watched, and at the end closed with balanced books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..broker.channel import Channel, Link
from ..broker.client_transitions import Books, ClientTransitions, OutgoingGroup
from ..broker.errors import BatchCancelledError, BatchError, BooksError, ClosedError, UnknownBatchError, UsageError
from ..broker.messages import ReplayOrigin
from ..collector import BatchCollection, Collector, GroupFailure, PackedGroup, PackedRow, Sink
from ..collector.sweep import Watched, outline
from ..collector.timing import COUNTERS
from ..producer import Producer, PromptGroup, Publication
from .outbox import Outbox

log = logging.getLogger("rolloutbus.trainer")


class BatchCounts(NamedTuple):
    """How the groups of a batch ended; published = completed + failed + cancelled."""

    published: int
    completed: int
    failed: int
    cancelled: int


class Delivered(NamedTuple):
    """One item for the consumer, and the group that may go from the broker once the consumer asks for the next one."""

    value: PackedGroup | PackedRow | GroupFailure
    acknowledges: int | None


class Ended(NamedTuple):
    """The batch is over: nothing more comes, or only this error."""

    error: BaseException | None


Parcel = Delivered | Ended


@dataclass(slots=True)
class Session:
    """What the client's thread knows of one batch. Everything but `outbox` belongs to that thread."""

    publication: Publication
    collection: BatchCollection
    outbox: Outbox[Parcel]
    run_id: str = ""
    resumed: bool = False
    books: Books | None = None
    closed: bool = False
    publishing: asyncio.Task[None] | None = None
    watched: Watched = field(init=False)

    def __post_init__(self) -> None:
        self.watched = Watched(self.collection, self._outline, self.publication.entries)

    def _outline(self, group: int) -> OutgoingGroup:
        about = self.publication.groups[group]
        # Whoever resumes a batch need not have its rows.
        return outline(self.batch, group, about.shard, about.route, self.publication.num_generations, about.first_row)

    @property
    def batch(self) -> str:
        return self.publication.batch

    @property
    def has_failed(self) -> bool:
        """Whether all who consume it are given an error in the end."""
        ending = self.outbox.ending
        return isinstance(ending, Ended) and ending.error is not None

    def note_start(self, started: Future[None]) -> None:
        """Where it could not begin, its consumers are told why."""
        cancelled = started.cancelled()
        error = ClosedError("the client was closed before this batch began") if cancelled else started.exception()
        if error is not None:
            self.outbox.end(Ended(error))

    def counts(self) -> BatchCounts:
        """As the client sees them; groups that have not ended count as cancelled once the batch is closed."""
        completed, failed = self.collection.completed, self.collection.failed
        published = max(self.publication.published, completed + failed)
        return BatchCounts(published, completed, failed, published - completed - failed if self.closed else 0)

    def metrics(self, prefix: str) -> dict[str, float]:
        """The names of section 8, so far or for the whole batch."""
        metrics = self.collection.timing.metrics(prefix, self.collection.collecting.total)
        for name in COUNTERS:
            metrics[f"{prefix}/{name}"] = float(getattr(self.books, name)) if self.books else 0.0
        metrics[f"{prefix}/duplicate_rows"] += self.collection.duplicate_rows
        return metrics


def new_session(
    batch: str,
    rows: Sequence[dict[str, Any]],
    groups: Sequence[PromptGroup],
    num_generations: int,
    *,
    rows_mode: bool,
    origin: ReplayOrigin | None = None,
) -> Session:
    """A batch that is ready to be published."""
    outbox: Outbox[Parcel] = Outbox()
    publication = Publication(batch, groups, num_generations, origin)
    sink = _sink(outbox, rows_mode)
    collection = BatchCollection(batch, rows, num_generations, [group.shard for group in groups], sink)
    # The sink needs the collection to know when the last group came, and the collection needs its sink first.
    sink.is_over = lambda: collection.all_ended
    return Session(publication, collection, outbox)


def _sink(outbox: Outbox[Parcel], rows_mode: bool) -> Sink:
    def on_group(outcome: PackedGroup | GroupFailure) -> None:
        if not (rows_mode and isinstance(outcome, PackedGroup)):
            outbox.put(Delivered(outcome, outcome.group_index))
        if sink.is_over():
            outbox.end(Ended(None))

    def on_row(row: PackedRow, group: int | None) -> None:
        outbox.put(Delivered(row, group))

    def on_error(error: BaseException) -> None:
        outbox.end(Ended(error))

    sink = Sink(on_group, on_error, on_row if rows_mode else None)
    return sink


class SessionRunner:
    """Runs sessions in the client's thread."""

    def __init__(self, link: Link, transitions: ClientTransitions, producer: Producer, collector: Collector) -> None:
        self._link = link
        self._transitions = transitions
        self._producer = producer
        self._collector = collector
        self.sessions: dict[str, Session] = {}
        self._resuming: set[str] = set()

    async def start(self, session: Session) -> None:
        """Begin to publish, with collecting already under way."""
        self._watch(session)
        await self._collector.attach(session.collection, session.publication.shards)
        # It may have been left meanwhile, or a broker that was restarted already has its publishing begun again.
        if not session.closed and session.publishing is None:
            session.publishing = asyncio.create_task(self._publish(session), name=f"publish {session.batch}")

    def _watch(self, session: Session) -> None:
        self.sessions[session.batch] = session

        def is_there() -> bool:
            channel = self._link.current
            return session.publication.opened and channel is not None and channel.hello.run_id == session.run_id

        session.watched.is_there = is_there

    async def resume(self, session: Session) -> None:
        """Go on with a sealed batch: everything on the streams is read again. `UsageError` where this client has it."""
        # Nothing is awaited between looking and taking it, or two that come at once would both find it free.
        if session.batch in self.sessions or session.batch in self._resuming:
            raise UsageError(
                f"batch {session.batch} is open in this client already; go on with the batch that `run_groups` or "
                "`resume` gave, which several tasks may iterate over together"
            )
        self._resuming.add(session.batch)
        try:
            await self._take_up(session)
        except BaseException:
            self.let_go(session)
            raise
        finally:
            self._resuming.discard(session.batch)

    async def _take_up(self, session: Session) -> None:
        session.run_id, session.resumed = await self._server(), True
        await self._transitions.adopt(session.batch)
        session.publication.opened = True
        self._watch(session)
        await self._collector.attach(session.collection, session.publication.shards, from_start=True)
        if session.collection.all_ended:
            session.outbox.end(Ended(None))

    def let_go(self, session: Session) -> None:
        """Nobody has it here; on the broker it stays as it is, for a `resume` to come."""
        # What has come of it must come again, and not be deleted as what is left of a batch that is over.
        session.collection.leftovers()
        if session.publishing is not None:
            session.publishing.cancel()
        self._forget(session)

    def _forget(self, session: Session) -> None:
        if self.sessions.get(session.batch) is session:
            self._collector.detach(session.batch)
            del self.sessions[session.batch]

    async def _publish(self, session: Session, *, again: bool = False) -> None:
        """Publish, and as often as the broker turns out to be another process than before, bring back what it may have
        lost.
        """
        try:
            while True:
                session.publication.opened = False
                run_id = session.run_id = await self._server()
                try:
                    await (self._bring_back(session) if again else self._producer.publish(session.publication))
                except BatchError:
                    # A broker that lost its data has no batch, or not all of it.
                    if run_id == await self._server():
                        raise
                if run_id == await self._server():
                    return
                again = True
        except Exception as error:
            session.outbox.end(Ended(error))

    async def _bring_back(self, session: Session) -> None:
        publication, out = session.publication, set(session.collection.unfinished())
        missing = [group for group in publication.groups if group.index in out and group.rows]
        if session.resumed:
            # The broker may have forgotten whose batch it is now.
            await self._adopt_again(session, able=len(missing) == len(out))
        if missing:
            log.warning("batch %s: looking after %d groups on the restarted broker", session.batch, len(missing))
            await self._producer.republish(publication, missing, session.collection.outcomes())
        publication.opened = True

    async def _adopt_again(self, session: Session, *, able: bool) -> None:
        try:
            await self._transitions.adopt(session.batch)
        except UnknownBatchError:
            if not able:
                raise

    async def _server(self) -> str:
        return (await self._link.retrying(_run_id))[0]

    def republish(self) -> None:
        """The broker is another process than before: bring back what it may have lost. Who still publishes will see it
        himself.
        """
        for session in self.sessions.values():
            self._republish(session)

    def look_after(self, session: Session) -> None:
        """Bring it back too where nobody was told of the restart: while it was being resumed, or connected for the
        first time.
        """
        channel = self._link.current
        if session.publication.opened and channel is not None and channel.hello.run_id != session.run_id:
            self._republish(session)

    def _republish(self, session: Session) -> None:
        """Not what has ended in an error, such as an operator's cancel: nobody wants it to run again."""
        is_busy = session.publishing is not None and not session.publishing.done()
        if not (session.closed or session.has_failed or is_busy):
            session.publishing = asyncio.create_task(
                self._publish(session, again=True), name=f"republish {session.batch}"
            )

    async def close(self, session: Session, *, complete: bool) -> None:
        """End the batch on the broker. With `complete` the books must balance, or `BooksError` says what they are."""
        if session.closed:
            return
        session.closed = True
        if not complete:
            session.outbox.end(Ended(BatchCancelledError(f"batch {session.batch} was cancelled by this client")))
        try:
            if session.publishing is not None and not session.publishing.done():
                session.publishing.cancel()
                await asyncio.gather(session.publishing, return_exceptions=True)
            await self._collector.handed_over()
            session.books = await self._transitions.close(session.batch, _queued(session))
        finally:
            # Not before: what comes while it closes would count as another batch's that may be resumed, and stay.
            self._forget(session)
        if complete:
            _check_books(session)


async def _run_id(channel: Channel) -> list[str]:
    return [channel.hello.run_id]


def _queued(session: Session) -> dict[str, list[str]]:
    """Entries that may still be on the streams, by shard."""
    queued: dict[str, list[str]] = {shard: [] for shard in session.publication.shards}
    for group in session.collection.unfinished():
        entry = session.publication.entries.get(group)
        if entry:
            queued[session.publication.groups[group].shard].append(entry)
    return queued


def _check_books(session: Session) -> None:
    counts, books = session.counts(), session.books
    if counts.cancelled or counts.published != session.collection.groups or (books is not None and not books.balanced):
        raise BooksError(
            f"the books of batch {session.batch} do not balance: {session.collection.groups} groups, {counts} here, "
            f"{books} on the broker; please report this with `rolloutbus explain`"
        )

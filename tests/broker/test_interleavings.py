"""Any interleaving of three workers, one client and an operator: each row counts once, the books balance, nothing is
left.
"""

from __future__ import annotations

import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rolloutbus.broker.client_transitions import cancel_batch
from rolloutbus.broker.errors import BatchCancelledError
from rolloutbus.broker.messages import parse_group
from rolloutbus.broker.scripts import SCRIPTS
from rolloutbus.broker.worker_transitions import Attempt, WorkerTransitions

from tests.broker.contract.stage import ALL, FAILURE, SHARD, Batch, Stage, result_rows
from tests.servers import FakeRunner

Value = TypeVar("Value")
GROUPS = 4
WORKERS = st.integers(0, 2)
ANY = st.integers(0, 1000)
POSITIONS = st.lists(st.sampled_from(ALL), min_size=1, max_size=len(ALL), unique=True)


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """fakeredis answers at once, so nothing ever waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a step waited")


class Interleaving(RuleBasedStateMachine):
    """`attempts` are all that were ever given out, those that lost their lease among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(FakeRunner(), "run")
        run(self.stage.runner.run([("SCRIPT", "LOAD", script.source) for script in SCRIPTS.values()]))
        self.workers = [self.stage.worker(f"math/{at}") for at in range(3)]
        self.attempts: list[tuple[WorkerTransitions, Attempt]] = []
        self.handed: list[int] = []
        self.batch: Batch | None = None
        self.open = False

    @initialize()
    def publish(self) -> None:
        self.batch = run(self.stage.sealed(GROUPS, self.stage.client(max_unread_bytes=400)))
        self.open = True
        self.handed.clear()

    def _take(self, worker: WorkerTransitions, raw: Any) -> None:
        group, token = parse_group(*raw), secrets.token_hex(4)
        taken = run(worker.take(group, token, observing=True, crash_limit=4))
        if taken.status == "ok":
            self.attempts.append((worker, Attempt(group, token, taken.attempt)))

    def _one(self, at: int) -> tuple[WorkerTransitions, Attempt]:
        return self.attempts[at % len(self.attempts)]

    @rule(at=WORKERS)
    def read(self, at: int) -> None:
        for raw in run(self.stage.read(self.workers[at])):
            self._take(self.workers[at], raw)

    @rule(at=WORKERS, observing=st.booleans())
    def claim(self, at: int, observing: bool) -> None:
        worker = self.workers[at]
        for raw in run(worker.fetch(run(worker.claim(2, observing=observing, peers=())).entries)):
            self._take(worker, raw)

    @precondition(lambda self: self.attempts)
    @rule(at=ANY)
    def lease_expires(self, at: int) -> None:
        _, attempt = self._one(at)
        if run(self.stage.raw("XPENDING", self.stage.stream, "workers", attempt.group.entry, attempt.group.entry, 1)):
            run(self.stage.expire_lease(attempt.group))

    @precondition(lambda self: self.attempts)
    @rule(at=ANY, positions=POSITIONS, finish=st.booleans(), twice=st.booleans())
    def accept(self, at: int, positions: list[int], finish: bool, twice: bool) -> None:
        worker, attempt = self._one(at)
        for _ in range(1 + twice):
            run(self.stage.accept(worker, attempt, result_rows(*positions), finish=finish))

    @precondition(lambda self: self.attempts)
    @rule(at=ANY)
    def finish_the_rest(self, at: int) -> None:
        worker, attempt = self._one(at)
        answer = run(self.stage.finish(worker, attempt))
        if answer.status == "duplicate":
            rest = [position for position in ALL if position not in answer.seen]
            rows = [result_rows(*rest)] if rest else []
            assert run(self.stage.accept(worker, attempt, *rows, finish=True)).status == "ok"

    @precondition(lambda self: self.attempts)
    @rule(at=ANY, limit=st.integers(1, 3), twice=st.booleans())
    def fail(self, at: int, limit: int, twice: bool) -> None:
        worker, attempt = self._one(at)
        ends = [run(worker.fail(attempt, FAILURE, limit=limit, delay_s=0)) for _ in range(1 + twice)]
        assert len(set(ends)) == 1

    @precondition(lambda self: self.attempts)
    @rule(at=ANY)
    def release(self, at: int) -> None:
        worker, attempt = self._one(at)
        run(worker.release(attempt))

    @precondition(lambda self: self.attempts)
    @rule(at=ANY, observing=st.booleans())
    def renew(self, at: int, observing: bool) -> None:
        worker, attempt = self._one(at)
        run(self.stage.renew(worker, attempt, observing=observing))

    @precondition(lambda self: self.open)
    @rule(seconds=st.sampled_from([0, 60, 700]))
    def owner_is_away(self, seconds: int) -> None:
        assert self.batch is not None
        run(self.stage.owner_absent(seconds, self.batch.client))

    @precondition(lambda self: self.open)
    @rule(at=ANY, reason=st.sampled_from(["deadline", "no_instance", "vanished"]))
    def expire(self, at: int, reason: str) -> None:
        assert self.batch is not None
        group = self.batch.groups[at % GROUPS]
        run(self.batch.client.expire(SHARD, group, self.batch.entries[group.group], reason, 0, FAILURE))

    @precondition(lambda self: self.open)
    @rule()
    def hand_over(self) -> None:
        assert self.batch is not None
        found = [entry for entry in run(self.stage.results()) if entry.batch == self.batch.id]
        self.handed += [index for entry in found if entry.kind == "rows" for index in entry.row_indices]
        for entry in found:
            size = len(entry.payload) if entry.kind != "cancelled" else 0
            run(self.batch.client.handed(entry.batch, SHARD, [], {entry.entry: size}))

    @rule()
    def scripts_are_flushed(self) -> None:
        run(self.stage.raw("SCRIPT", "FLUSH"))

    @precondition(lambda self: self.open)
    @rule()
    def operator_cancels(self) -> None:
        assert self.batch is not None
        run(cancel_batch(self.stage.runner, self.stage.keys, self.batch.id, "trainer", [SHARD], "why"))

    @precondition(lambda self: self.open)
    @rule(again=st.booleans())
    def close(self, again: bool) -> None:
        assert self.batch is not None
        self.hand_over()
        run(self.batch.client.own())
        books = run(self.batch.close())
        assert books is not None
        assert books.balanced, books
        assert books.published == GROUPS
        self.open = False
        left = run(self.stage.key_names())
        assert not [name for name in left if name.startswith(("batch", "accepted", "delayed", "parked"))], left
        assert run(self.stage.queued()) == []
        assert run(self.stage.pending()) == 0
        assert run(self.stage.results()) == []
        if again:
            self.publish()

    @invariant()
    def each_row_counts_once(self) -> None:
        if self.open and self.batch is not None:
            found = [entry for entry in run(self.stage.results()) if entry.batch == self.batch.id]
            rows = self.handed + [index for entry in found if entry.kind == "rows" for index in entry.row_indices]
            assert len(rows) == len(set(rows)), rows
            accepted = sum(
                int((run(self.stage.record(self.batch, at)) or {"accepted": 0})["accepted"]) for at in range(GROUPS)
            )
            assert accepted <= len(rows)

    @invariant()
    def unread_and_queued_bytes_are_what_is_there(self) -> None:
        if self.open and self.batch is not None:
            found = [entry for entry in run(self.stage.results()) if entry.batch == self.batch.id]
            unread = sum(len(entry.payload) for entry in found if entry.kind != "cancelled")
            assert run(self.stage.count(self.batch, "unread_bytes")) == unread
            assert run(self.stage.count(self.batch, f"queued_bytes:{SHARD}")) >= 0

    def teardown(self) -> None:
        if self.open and self.batch is not None:
            try:
                self.close(again=False)
            except BatchCancelledError as error:
                raise AssertionError("a cancelled batch could not be closed") from error


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)

"""One attempt from its token to its end: run, publish row by row, finish; or fail, or hand back, or be cancelled.

The ends are exclusive: a lost lease writes nothing more, a failure is reported once with its class, a hand-back counts
as none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ..broker import codec
from ..broker.channel import Payload
from ..broker.errors import DecodeError, EnvironmentContractError, PayloadTooLargeError, RolloutBusError
from ..broker.messages import Failure
from ..broker.wording import excerpt
from ..broker.worker_transitions import Attempt, Taken, WorkerTransitions
from .environments.base import Environment, ReportsTiming, Row
from .environments.exits import EXITS, contained, text_of
from .failures import describe, retry_delay
from .finishing import Finisher, LostAttemptError, Outgoing
from .running import EnvironmentCancelledError, OnResult, run_rows
from .timing import BatchTiming, InstanceTiming
from .worker_settings import WorkerSettings

log = logging.getLogger("rolloutbus.worker")


class DeadlineExceededError(RolloutBusError, TimeoutError):
    """A group used up its time over all attempts."""


class AttemptRunner:
    """Runs attempts of one instance in `environment`."""

    def __init__(
        self,
        environment: Environment,
        transitions: WorkerTransitions,
        finisher: Finisher,
        settings: WorkerSettings,
        timing: InstanceTiming,
    ) -> None:
        self._environment = environment
        self._transitions = transitions
        self._finisher = finisher
        self._settings = settings
        self._timing = timing
        # Asked once: whether an object has a protocol's methods takes longer to find out than to run a row.
        self._reports = environment if isinstance(environment, ReportsTiming) else None

    async def serve(self, attempt: Attempt, taken: Taken, stopped: asyncio.Future[str]) -> str:
        """Bring one attempt to its end and say which: done, retry, dead, lost, gone or released.

        `stopped` may be resolved from outside, with lost, gone or release: the rollout is cancelled, and reported
        accordingly.
        """
        timing = self._timing.of(attempt.group.batch)
        now = time.monotonic()
        if attempt.number == 1:
            # When the wait for a later one began, nobody knows; it did not run from the group's publication on.
            timing.add("queue_wait", now - taken.queued_ms / 1000, now)
        timing.count_group()
        missing = attempt.group.rows - len(taken.accepted)
        outgoing = self._finisher.begin(attempt, whole=self._settings.commit == "group", missing=missing)
        try:
            return await self._run(attempt, taken, outgoing, stopped, timing)
        finally:
            self._finisher.drop(outgoing)

    async def _run(
        self, attempt: Attempt, taken: Taken, outgoing: Outgoing, stopped: asyncio.Future[str], timing: BatchTiming
    ) -> str:
        left = self._settings.group_timeout_s - taken.age_ms / 1000
        work = asyncio.create_task(self._work(attempt, taken, outgoing, timing), name=f"group {attempt.group.group}")
        with timing.going_on("environment"):
            try:
                await asyncio.wait(
                    {work, stopped, outgoing.settled}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                # What ended by itself, not what gives way to the cancellation below.
                ended = work.done()
                if not ended:
                    await self._cancel(work, attempt)
        if stopped.done():
            return await self._stopped(attempt, outgoing, stopped.result())
        if outgoing.settled.done() or (work.done() and not work.cancelled() and work.exception() is None):
            return await self._settled(attempt, taken, outgoing, timing)
        if ended:
            return await self._failed(attempt, taken, outgoing, _error_of(work))
        return await self._failed(attempt, taken, outgoing, DeadlineExceededError(
            f"group {attempt.group.group} did not finish within {self._settings.group_timeout_s:g} s over all its "
            "attempts; raise group_timeout_s or look for a rollout that never ends"
        ))  # fmt: skip

    async def _work(self, attempt: Attempt, taken: Taken, outgoing: Outgoing, timing: BatchTiming) -> None:
        rows = self._rows(attempt, taken)
        group = attempt.group
        on_result = self._publisher(outgoing, taken.accepted, group.first_row, rows, timing)
        independent = self._settings.rerun == "missing"
        if rows:
            group_id = rows[0]["_group_id"]
            await run_rows(self._environment, rows, on_result, independent=independent)
            if self._reports is not None:
                _take_timing(self._reports, group_id, timing)
        self._finisher.complete(outgoing)

    def _rows(self, attempt: Attempt, taken: Taken) -> list[Row]:
        """The rows to run, each with the identity of this attempt; only the missing ones where rows are independent."""
        group = attempt.group
        rows = codec.decode_rows(group.payload)
        if len(rows) != group.rows:
            raise DecodeError(
                f"group {group.group} holds {len(rows)} rows and says {group.rows}; it was changed on the broker"
            )
        identity = f"{group.batch}:{group.group}:{attempt.number}"
        for at, row in enumerate(rows, start=group.first_row):
            if row.get("_rowidx") != at:
                raise DecodeError(f"row {at} says that it is row {row.get('_rowidx')!r}; it was changed on the broker")
            row["_group_id"] = identity
        if self._settings.rerun == "missing":
            rows = [row for at, row in enumerate(rows) if at not in taken.accepted]
        return rows

    def _publisher(
        self, outgoing: Outgoing, accepted: frozenset[int], first_row: int, rows: list[Row], timing: BatchTiming
    ) -> OnResult:
        limit = self._transitions.settings.max_payload_bytes
        # Once and for all: the rows belong to the environment now, which may change them.
        indices = [row["_rowidx"] for row in rows]

        def publish(at: int, result: Mapping[str, Any]) -> asyncio.Future[None] | None:
            index = indices[at]
            if index - first_row in accepted:
                return None
            started = time.monotonic()
            payload = Payload.of(codec.encode(result, where=f"result of row {index}"))
            if payload.size > limit:
                raise PayloadTooLargeError(
                    f"the result of row {index} is {payload.size} bytes, above max_payload_bytes ({limit}); "
                    "return less, or raise the limit"
                )
            timing.spend("postprocess_results", time.monotonic() - started)
            return self._finisher.add(outgoing, index - first_row, payload)

        return publish

    async def _settled(self, attempt: Attempt, taken: Taken, outgoing: Outgoing, timing: BatchTiming) -> str:
        """Everything is handed to the finisher: wait for the broker's word, which comes or the connection gives up."""
        try:
            with timing.going_on("publish"):
                await outgoing.settled
        except LostAttemptError as error:
            return "gone" if str(error) == "gone" else "lost"
        except RolloutBusError as error:
            return await self._failed(attempt, taken, outgoing, error)
        return "done"

    async def _stopped(self, attempt: Attempt, outgoing: Outgoing, why: str) -> str:
        if why != "release":
            return why
        await self._cease(outgoing)
        await self._transitions.release(attempt)
        return "released"

    async def _cease(self, outgoing: Outgoing) -> None:
        """Write nothing more of this attempt, which is about to give its group up: that would come too late.

        Rows that finished before need not run again, where only missing ones do, so they are waited for.
        """
        if self._settings.rerun == "missing":
            await self._finisher.written(outgoing)
        self._finisher.drop(outgoing)

    async def _failed(self, attempt: Attempt, taken: Taken, outgoing: Outgoing, error: BaseException) -> str:
        await self._cease(outgoing)
        failure = describe(error)
        late = isinstance(error, DeadlineExceededError)
        infra = failure.failure_class == "infra"
        before = taken.infra_failures if infra else taken.data_failures
        limit = 0 if late else self._settings.infra_attempts if infra else self._settings.data_attempts
        delay = retry_delay(before + 1, self._settings)
        outcome = await self._transitions.fail(attempt, failure, limit=limit, delay_s=delay)
        _log_failure(attempt, failure, outcome, delay)
        return outcome

    async def _cancel(self, work: asyncio.Task[None], attempt: Attempt) -> None:
        """Cancel the rollout and give it a moment; one that swallows the cancellation is left behind, named."""
        work.cancel()
        _, left = await asyncio.wait({work}, timeout=self._settings.cancel_grace_s)
        if left:
            log.error(
                "group %s of batch %s did not give way to its cancellation", attempt.group.group, attempt.group.batch
            )
            work.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif not work.cancelled():
            work.exception()


def _take_timing(reports: ReportsTiming, group_id: str, timing: BatchTiming) -> None:
    try:
        for name, seconds in reports.take_timing(group_id).items():
            timing.spend(name, seconds)
    # The rows are done, and what is only told about them must not fail them.
    except (Exception, *EXITS) as error:
        # What may be somebody's Ctrl-C goes on.
        why = contained(error, "take_timing") if isinstance(error, EXITS) else error
        log.warning("%s: its times are left out: take_timing raised %s(%s)", group_id, type(why).__name__, text_of(why))


def _error_of(work: asyncio.Task[None]) -> BaseException:
    """What a rollout that ended by itself ended with."""
    if work.cancelled():
        return EnvironmentCancelledError("the environment cancelled the task that ran it; let it raise what went wrong")
    return work.exception() or EnvironmentContractError("the environment ended without a word")


def _log_failure(attempt: Attempt, failure: Failure, outcome: str, delay: float) -> None:
    group = attempt.group
    then = f"again in {delay:.1f} s" if outcome == "retry" else outcome
    log.warning(
        "batch %s group %s route %s attempt %s failed (%s): %s: %s; %s",
        group.batch, group.group, group.route, attempt.number, failure.failure_class, failure.type,
        excerpt(failure.message, 300), then,
    )  # fmt: skip

"""What serves a run with one handle, in one event loop: the lease on the run, its one route, and a worker loop that is
begun again when it ends by itself, as often as a fleet's instance would be. Then the shard is published as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final

from ...broker.channel import Link
from ...broker.fleet_requests import Request
from ...broker.fleet_transitions import FleetTransitions, Published
from ...broker.keys import ANY_ROUTE, UNSHARDED_SHARD, Keys
from ...broker.scripts import load_scripts
from ...broker.settings import BrokerSettings
from ...broker.shard_records import ShardRecord
from ..fleet_config import FleetSettings
from ..worker import ShardWorker
from ..worker_settings import WorkerSettings
from .actor import Trouble
from .handle_environment import HandleEnvironment
from .instances import Ends
from .lease import FleetLease, quietly
from .supervision import Fault, RestartPolicy

log = logging.getLogger("rolloutbus.fleet")

# A handle comes without `rolloutbus.fleet`.
FLEET: Final = FleetSettings()
_REFUSAL = "the fleet of this run is one actor that a trainer holds; it can neither grow nor shrink"


class HandleEngine:
    """One handle at work; all methods run in the loop that made it."""

    def __init__(
        self, handle: Any, arguments: Sequence[Any], workers: WorkerSettings, settings: BrokerSettings, run: str
    ) -> None:
        self.lost = ""
        self._environment = HandleEnvironment(handle, arguments)
        self._workers = workers
        self._settings = settings
        self._run = run
        self._link = Link(settings, "fleet", load_scripts)
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        self._transitions = FleetTransitions(self._link, Keys(run), settings, holder)
        self._lease = FleetLease(self._link, self._transitions, [UNSHARDED_SHARD], self._on_request, self._on_lost)
        self._worker = self._new_worker()
        self._ending = asyncio.Event()
        self._working: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Publish, and begin to take groups; raises `FleetError` for a run that is taken, and then has left nothing."""
        try:
            await self._lease.claim()
            await self._lease.publish(self._published())
        except BaseException:
            await self._leave_broker()
            raise
        self._working = asyncio.create_task(self._keep_working(), name="handle")

    async def leave(self) -> None:
        """Drain, and take the run's keys off the broker."""
        self._ending.set()
        self._worker.drain()
        try:
            if self._working is not None:
                await self._end_work(self._working)
        finally:
            await self._leave_broker()

    async def _end_work(self, working: asyncio.Task[None]) -> None:
        """A worker loop that begins, or ends, without a broker would wait for it as long as for one that comes back."""
        patience_s = self._workers.drain_timeout_s + self._link.patience_s(FLEET.stop_timeout_s)
        _, late = await asyncio.wait({working}, timeout=patience_s)
        if late:
            working.cancel()
            await asyncio.wait(late)

    async def _keep_working(self) -> None:
        policy, ends = RestartPolicy(FLEET), Ends()
        while not self._ending.is_set():
            fault = await self._work()
            if self._ending.is_set():
                return
            delay = policy.after(fault, ends, time.monotonic())
            if delay is None:
                await self._give_up(fault)
                return
            log.error("the worker loop around the handle ended: %s; it begins again in %.1f s", fault.words, delay)
            await self._note_end("instance-cut-off" if fault.broker_away else "instance-died", fault.words)
            # If another fleet took the label, the lease says so by then, and this one ends.
            await self._pause(max(delay, 2 * self._settings.renew_every_s))
            # The next one waits for the broker by itself.
            ends.cut_off = 0
            self._worker = self._new_worker()

    async def _work(self) -> Fault:
        """Why the worker loop ended."""
        try:
            await self._worker.run()
        except Exception as error:
            trouble = Trouble.of(error)
            return Fault(str(trouble), trouble.broker_away)
        return Fault("another process took its label" if self._worker.replaced else "it ended by itself")

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)

    async def _note_end(self, kind: str, words: str) -> None:
        """What it held may be taken over at once."""
        who = self._worker.identity
        await self._quietly(self._transitions.bury(who.shard, who.label, who.consumer, who.incarnation))
        await self._quietly(self._transitions.note(kind, who.label, words))

    async def _give_up(self, fault: Fault) -> None:
        self.lost = f"{fault.words}; {FLEET.max_restarts} restarts within an hour did not help"
        log.error("the handle of run %s is given up: %s", self._run, self.lost)
        await self._note_end("instance-lost", self.lost)
        await self._lease.publish_loss(self._published(), "the handle")

    def _new_worker(self) -> ShardWorker:
        return ShardWorker(
            self._settings, self._run, UNSHARDED_SHARD, UNSHARDED_SHARD, self._environment, self._workers
        )

    def _published(self) -> Published:
        at, labels = self._workers, [] if self.lost else [UNSHARDED_SHARD]
        record = ShardRecord(
            replicas=len(labels), slots=at.slots, commit=at.commit, rerun=at.rerun, group_timeout_s=at.group_timeout_s,
            labels=labels, lost=self.lost,
        )  # fmt: skip
        return Published({ANY_ROUTE: UNSHARDED_SHARD}, {UNSHARDED_SHARD: record})

    def _on_request(self, request: Request) -> None:
        self._refusing = asyncio.ensure_future(self._quietly(self._transitions.answer(request, _REFUSAL)))

    def _on_lost(self, holder: str) -> None:
        log.error("run %s has another fleet now (%s); this one ends", self._run, holder)
        self._ending.set()
        self._worker.stop()

    async def _leave_broker(self) -> None:
        await self._quietly(self._lease.give_up([UNSHARDED_SHARD]))
        await self._lease.stop()
        await self._link.close()

    async def _quietly(self, work: Awaitable[object]) -> None:
        await quietly(self._link, FLEET.stop_timeout_s, self._run, work)

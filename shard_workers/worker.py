"""A shard worker: one instance that reads groups, holds their leases, runs them, and finishes them. No Ray in it.

Reading, leasing, running and finishing are four things in four files; here they are joined. Every entry this process
was given is in exactly one place: waiting for its token, running, or ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..broker.channel import Link
from ..broker.errors import RolloutBusError
from ..broker.keys import Keys
from ..broker.messages import ForeignEntryError, GroupEntry, parse_group
from ..broker.scripts import load_scripts
from ..broker.settings import BrokerSettings
from ..broker.worker_transitions import Attempt, Identity, WorkerTransitions
from .allocator import keep_freed_memory
from .attempts import AttemptRunner
from .environments.base import Environment
from .finishing import Finisher
from .leases import LeaseKeeper
from .reading import GroupReader, RawEntry
from .slots import Slots
from .timing import InstanceTiming
from .worker_settings import WorkerSettings

log = logging.getLogger("rolloutbus.worker")

# How often due retries, parked groups and expired leases are looked for, and how soon again while some are parked,
# after one was put aside, and where there were as many as places.
CLAIM_EVERY_S = 1.0
CLAIM_AGAIN_S = 0.05
# A retry is left to instances that have not failed it for this part of a group's time, or a lease: they may live, and
# have no place for it until the time is over.
PATIENCE = 0.1
# Ends of an attempt after which its group is due again, perhaps before the next look.
COMES_AGAIN = frozenset({"parked", "retry", "suspect"})


class WorkerStatistics(NamedTuple):
    """A look at a worker: groups running, slots, and how many attempts ended in which way."""

    running: int
    slots: int
    ended: dict[str, int]


class ShardWorker:
    """One instance of `shard` under `label`. `run` returns after `drain`, `stop`, or when the label was taken by
    another process.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        run: str,
        shard: str,
        label: str,
        environment: Environment,
        worker_settings: WorkerSettings | None = None,
    ) -> None:
        self.settings = worker_settings or WorkerSettings()
        self.identity = Identity(shard, label, secrets.token_hex(4), socket.gethostname(), os.getpid())
        self.replaced = False
        keys = Keys(run)
        self._broker = settings
        self._link = Link(settings, f"worker:{label}", load_scripts)
        self._transitions = WorkerTransitions(self._link, keys, settings, self.identity)
        timing = InstanceTiming(self.identity.incarnation)
        self._finisher = Finisher(self._transitions, timing)
        self._runner = AttemptRunner(environment, self._transitions, self._finisher, self.settings, timing)
        self._leases = LeaseKeeper(settings, keys, self.identity, self.settings.slots, self._on_lost, self._on_replaced)
        self._reader = GroupReader(
            settings, self._link, self._transitions, f"reader:{label}", lambda: self._finisher.group_bytes
        )
        self._slots = Slots(self.settings.slots)
        # Unique without asking the kernel for randomness each time: the first half is this process's.
        self._tokens = map((secrets.token_hex(8) + "{:x}").format, itertools.count())
        self._in_hand: dict[str, asyncio.Future[str]] = {}
        self._stops: dict[str, asyncio.Future[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: dict[str, int] = {}
        self._stopping = asyncio.Event()
        self._more_due = asyncio.Event()
        # When running groups are handed back, once it is to stop.
        self._release_at = math.inf
        self._waits: asyncio.Timeout | None = None
        self._patience_s = max(settings.lease_s, self.settings.group_timeout_s * PATIENCE)
        self._releasing = False
        self._cleaning: asyncio.Task[None] | None = None

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(len(self._stops), self.settings.slots, dict(self._ended))

    async def run(self) -> None:
        """Work until told to stop, then let running groups finish or hand them back, and leave the books in order."""
        keep_freed_memory()
        await self._transitions.prepare()
        await self._transitions.register()
        self._leases.start()
        duties = [
            asyncio.create_task(self._finisher.run(), name="finisher"),
            asyncio.create_task(self._read(), name="reader"),
            asyncio.create_task(self._claim_for_ever(), name="claimer"),
        ]
        stop = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait({*duties, stop}, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if task is not stop), None)
            if failed is not None:
                await failed
            await self._end_work(duties)
        finally:
            stop.cancel()
            # Whoever cancels once more ends the waiting for it.
            self._cleaning = asyncio.create_task(self._clean_up(duties), name="clean up")
            await asyncio.shield(self._cleaning)

    def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing more; groups that still run after `timeout_s` are handed back. `run` then returns.

        Said again, the earlier moment counts.
        """
        wait_s = self.settings.drain_timeout_s if timeout_s is None else timeout_s
        self._release_at = min(self._release_at, time.monotonic() + wait_s)
        self._stopping.set()
        self._more_due.set()
        if self._waits is not None:
            self._waits.reschedule(asyncio.get_running_loop().time() + self._release_at - time.monotonic())

    def stop(self) -> None:
        """Hand everything back at once."""
        self.drain(0)

    async def _read(self) -> None:
        async for raw in self._reader.entries(self._slots):
            await self._admit(raw)
        await self._stopping.wait()

    async def _admit(self, raw: RawEntry) -> None:
        entry = bytes(raw[0]).decode()
        if entry in self._in_hand:
            return
        try:
            group = parse_group(*raw)
        except ForeignEntryError as error:
            log.error("%s: set aside to the dead letters: %s", self.identity.label, error)
            await self._transitions.set_aside(entry, str(error))
            return
        # Before waiting for a slot: reader and claimer may both be given this entry.
        self._in_hand[entry] = stopped = asyncio.get_running_loop().create_future()
        try:
            await self._slots.occupy()
        except asyncio.CancelledError:
            del self._in_hand[entry]
            raise
        if self._releasing and not stopped.done():
            stopped.set_result("release")
        task = asyncio.create_task(self._serve(group, stopped), name=f"attempt {group.batch} {group.group}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, group: GroupEntry, stopped: asyncio.Future[str]) -> None:
        outcome, started = "error", time.monotonic()
        try:
            outcome = await self._attempt(group, stopped)
        except RolloutBusError as error:
            # The lease runs out and another instance takes the group; here it must not go unseen.
            log.exception("%s: batch %s group %s: %s", self.identity.label, group.batch, group.group, error)
        finally:
            self._ended[outcome] = self._ended.get(outcome, 0) + 1
            if outcome == "done":
                self._reader.group_ended(time.monotonic() - started)
            elif outcome in COMES_AGAIN:
                self._more_due.set()
            del self._in_hand[group.entry]
            self._slots.release()

    async def _attempt(self, group: GroupEntry, stopped: asyncio.Future[str]) -> str:
        token = next(self._tokens)
        taken = await self._transitions.take(
            group, token, observing=self._observing(), crash_limit=self.settings.infra_attempts
        )
        if taken.status == "unknown":
            await self._transitions.set_aside(group.entry, f"batch {group.batch} does not know its group {group.group}")
        if taken.status != "ok":
            return taken.status
        self._reader.waiting = taken.waiting
        attempt = Attempt(group, token, taken.attempt)
        self._leases.hold(attempt)
        self._stops[token] = stopped
        try:
            return await self._runner.serve(attempt, taken, stopped)
        finally:
            self._leases.forget(attempt)
            del self._stops[token]
            if taken.infra_failures == self.settings.infra_attempts - 1:
                # It was on its last chance, and others like it may have waited for it to end.
                self._more_due.set()

    async def _claim_for_ever(self) -> None:
        while not self._stopping.is_set():
            # The reader would have each place that comes free, as long as its stream has anything, and what is due or
            # lost its instance would wait until all new groups have had their turn.
            async with self._slots.ahead():
                self._more_due.clear()
                pause = 0.0 if self._stopping.is_set() else await self._claim_once()
            await self._until_next_look(pause)

    async def _until_next_look(self, pause: float) -> None:
        """Seconds `pause`, but shorter where a group that comes again was put aside meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._more_due.wait(), pause)
            await asyncio.wait_for(self._stopping.wait(), CLAIM_AGAIN_S)

    async def _claim_once(self) -> float:
        """Look once for groups that may run again; returns the seconds until the next look."""
        try:
            peers = await self._transitions.peers()
            if peers.planned is not None:
                # Also those that are yet to come: what is read here at once is not left to them.
                self._reader.replicas = 1 + len(peers.planned)
            free = self._slots.free
            claimed = await self._transitions.claim(
                free, observing=self._observing(), peers=peers.living, patience_s=self._patience_s
            )
            for raw in await self._transitions.fetch(claimed.entries):
                await self._admit(raw)
            if claimed.entries and not self._slots.free:
                # It waits for the slot that is taken now: what it got would wait in hand, beside peers that are idle.
                await self._reader.interrupt()
        except RolloutBusError as error:
            log.warning("%s: cannot look for groups to take over (%s)", self.identity.label, error)
            return CLAIM_EVERY_S
        # As many as were asked for: there may be more, and new groups would have the places that come free until then.
        if len(claimed.entries) >= free:
            return 0.0
        if claimed.parked:
            return CLAIM_AGAIN_S
        due = CLAIM_EVERY_S if claimed.next_due_ms is None else claimed.next_due_ms / 1000
        return min(CLAIM_EVERY_S, max(due, CLAIM_AGAIN_S))

    def _observing(self) -> bool:
        return self._link.watched_for(self._broker.lease_s)

    def _on_lost(self, token: str, status: str) -> None:
        stopped = self._stops.get(token)
        if stopped is not None and not stopped.done():
            stopped.set_result(status)

    def _on_replaced(self) -> None:
        log.error("%s: another process has this label now; stopping", self.identity.label)
        self.replaced = True
        self.stop()

    async def _end_work(self, duties: Sequence[asyncio.Task[Any]]) -> None:
        """Let running groups finish for a while, then hand them back; nothing that was delivered is left untaken."""
        await self._reader.stop()
        _, reader, claimer = duties
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._release_at - time.monotonic()) as self._waits:
                await asyncio.wait([reader, claimer, *self._tasks])
        self._waits = None
        self._releasing = True
        for stopped in self._in_hand.values():
            if not stopped.done():
                stopped.set_result("release")
        # A broker that is away cannot be told: the leases end there by themselves.
        try:
            async with asyncio.timeout(self._broker.command_timeout_s + self.settings.cancel_grace_s):
                await asyncio.wait([reader, claimer])
                if self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            log.warning(
                "%s: the broker is away; %d groups are left to their leases", self.identity.label, len(self._tasks)
            )

    async def _clean_up(self, duties: Sequence[asyncio.Task[Any]]) -> None:
        for task in [*duties, *self._tasks]:
            task.cancel()
        await self._leases.stop()
        await asyncio.gather(*duties, *self._tasks, return_exceptions=True)
        await self._reader.close()
        await self._sign_off()
        await self._link.close()

    async def _sign_off(self) -> None:
        """Off the books, unless the broker is away or hangs: then the record expires by itself."""
        if self._link.current is None:
            return
        try:
            async with asyncio.timeout(self.settings.cancel_grace_s):
                await self._transitions.leave()
        except (RolloutBusError, TimeoutError) as error:
            why = str(error) or "no answer"
            log.warning("%s: could not sign off (%s); its record expires by itself", self.identity.label, why)

"""Watching over instances: a dead process, a sick environment, a worker loop that ended; each is replaced in its place,
within a budget. A broker out of an instance's reach is waited for and is nobody's death, however long it lasts.

Ray must not do it: it would bring back a process without its servers. What a dead instance held is freed before its
successor starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...broker.errors import RolloutBusError
from ..fleet_config import FleetConfig, FleetSettings
from .actor import BUSY, REPLACED
from .instances import Ends, Instance, InstanceTroubleError, Launcher, State, told

log = logging.getLogger("rolloutbus.fleet")

HOUR_S: Final = 3600.0
# Enough to be at the longest wait, and a power that a float holds.
_DOUBLINGS: Final = 30


class Fault(NamedTuple):
    """Why an instance has to be started again, in words."""

    words: str
    broker_away: bool = False


class RestartPolicy:
    """How often, and after how long, an instance may be replaced; counts the deaths of the last hour."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings

    def after(self, fault: Fault, ends: Ends, now: float) -> float | None:
        """Note an end at `now` (seconds); how long to wait before the next start, None when the budget is spent."""
        if fault.broker_away:
            ends.cut_off += 1
            return self.delay(ends.cut_off)
        ends.cut_off = 0
        return self.next_delay(ends.deaths, now)

    def next_delay(self, deaths: deque[float], now: float) -> float | None:
        """`after` a death."""
        while deaths and now - deaths[0] >= HOUR_S:
            deaths.popleft()
        deaths.append(now)
        return self.delay(len(deaths)) if len(deaths) <= self._settings.max_restarts else None

    def delay(self, tries: int) -> float:
        """How long to wait before the `tries`-th start in a row."""
        at = self._settings
        return min(at.restart_backoff_s * 2 ** min(tries - 1, _DOUBLINGS), at.restart_backoff_max_s)


@dataclass(frozen=True)
class Callbacks:
    """What the fleet does for its supervisor: free a dead one's groups, publish that an instance is lost, note what
    happened.
    """

    free_groups: Callable[[Instance], Awaitable[int]]
    give_up: Callable[[Instance, str], Awaitable[None]]
    note: Callable[[str, Instance, str], Awaitable[None]]


class Supervisor:
    """One task per instance, from `watch` until the instance is lost or `leave` ends it."""

    def __init__(self, config: FleetConfig, launcher: Launcher, callbacks: Callbacks) -> None:
        self._config = config
        self._launcher = launcher
        self._callbacks = callbacks
        self._policy = RestartPolicy(config.fleet)

    def watch(self, instance: Instance) -> None:
        """Begin."""
        instance.watch = asyncio.create_task(self._watch(instance), name=f"watch {instance.label}")
        instance.watch.add_done_callback(_log_failure)

    async def leave(self, instance: Instance) -> None:
        """Watch no more, whatever is being done about the instance; its process is left as it is."""
        task, instance.watch = instance.watch, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _watch(self, instance: Instance) -> None:
        fault = await self._fault(instance)
        while (delay := self._policy.after(fault, instance.ends, time.monotonic())) is not None:
            instance.state = State.RESTARTING
            log.error("%s; starting it again in %.1f s (restart %d)", fault.words, delay, instance.restarts + 1)
            await self._free(instance)
            # A night without the broker would fill the record with one instance's tries.
            if instance.ends.cut_off <= 1:
                kind = "instance-cut-off" if instance.ends.cut_off else "instance-died"
                await self._callbacks.note(kind, instance, fault.words)
            await asyncio.sleep(delay)
            instance.restarts += 1
            try:
                await self._launcher.start(instance)
                await self._launcher.begin(instance)
            except InstanceTroubleError as error:
                fault = Fault(f"{error}\n{error.trace}".rstrip(), error.broker_away)
                continue
            instance.state, instance.ends.cut_off = State.RUNNING, 0
            log.warning("%s runs again in process %d", instance.name, instance.identity.pid if instance.identity else 0)
            await self._callbacks.note("instance-restarted", instance, f"restart {instance.restarts}")
            fault = await self._fault(instance)
        await self._free(instance)
        instance.state = State.LOST
        limit = self._config.fleet.max_restarts
        first_line = fault.words.partition("\n")[0]
        reason = f"{first_line}; {instance.restarts} restarts (max_restarts {limit} per hour) did not help"
        log.error("%s is given up: %s", instance.name, reason)
        await self._callbacks.note("instance-lost", instance, reason)
        await self._callbacks.give_up(instance, reason)

    async def _free(self, instance: Instance) -> None:
        """The process is ended for certain, then its groups may go to others."""
        try:
            await self._launcher.stop(instance)
        except InstanceTroubleError as error:
            log.debug("while ending %s: %s", instance.name, error)
        try:
            held = await self._callbacks.free_groups(instance)
        except RolloutBusError as error:
            log.warning("%s: cannot free its groups now (%s); their leases run out by themselves", instance.name, error)
            return
        if held:
            log.warning("%s held %d groups; they may be taken over now", instance.name, held)

    async def _fault(self, instance: Instance) -> Fault:
        """Wait for something to be wrong, and say what."""
        assert instance.ended is not None
        checks = asyncio.create_task(self._sickness(instance), name=f"health {instance.label}")
        try:
            await asyncio.wait({instance.ended, checks}, return_when=asyncio.FIRST_COMPLETED)
            return await self._end(instance, instance.ended) if instance.ended.done() else Fault(checks.result())
        finally:
            checks.cancel()
            await asyncio.wait({checks})

    async def _end(self, instance: Instance, ended: asyncio.Future[object]) -> Fault:
        try:
            reason = told(instance, "work", ended)
        except InstanceTroubleError as error:
            return Fault(str(error), error.broker_away)
        if reason == REPLACED:
            # If it was another fleet, the lease says so by then, and this fleet ends instead of fighting for the label.
            await asyncio.sleep(2 * self._config.broker.renew_every_s)
            return Fault(f"{instance.name} stopped because another process took its label")
        return Fault(f"{instance.name}: its worker loop ended by itself")

    async def _sickness(self, instance: Instance) -> str:
        """Ask for its health until it has failed several times in a row, or was out of reach for too long."""
        every_s = self._config.workers[instance.shard.name].health_every_s
        failures, answered = 0, time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            try:
                said = await self._launcher.health(instance)
            except InstanceTroubleError as error:
                failures += 1
                log.warning("%s (failure %d of %d in a row)", error, failures, self._config.fleet.health_failures)
                if failures >= self._config.fleet.health_failures:
                    return str(error)
                continue
            if said != BUSY:
                failures, answered = 0, time.monotonic()
            elif time.monotonic() - answered > self._config.fleet.blocked_timeout_s:
                return f"{instance.name}: its event loop has been blocked for {time.monotonic() - answered:.0f} s"


def _log_failure(watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        log.error("%s ended: %s", watch.get_name(), error)

"""The fleet's hold on its run: a lease that is renewed, and what was published, again where a broker lost it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...broker.channel import Link
from ...broker.errors import FleetError, RolloutBusError
from ...broker.fleet_requests import Request
from ...broker.fleet_transitions import FleetTransitions, Published

log = logging.getLogger("rolloutbus.fleet")


class FleetLease:
    """Renews each `renew_every_s`. `on_request` gets every wish once; `on_lost(holder)` is the last thing that is
    called.
    """

    def __init__(
        self,
        link: Link,
        transitions: FleetTransitions,
        shards: Sequence[str],
        on_request: Callable[[Request], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.held = False
        self._link = link
        self._transitions = transitions
        self._shards = shards
        self._on_request = on_request
        self._on_lost = on_lost
        self._published: Published | None = None
        self._known: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def claim(self) -> None:
        """Take the run and keep it; raises `FleetError` where another fleet has it."""
        await self._transitions.claim()
        self._keep()

    async def publish(self, published: Published, *, replace: bool = False) -> None:
        """Publish, and keep published: where the broker is away, the renewal that finds it again does it."""
        before, self._published = self._published, published
        try:
            await self._transitions.publish(published, replace=replace)
        except FleetError:
            # A refusal: the broker has what it had.
            self._published = before
            raise
        self._keep()

    async def publish_loss(self, published: Published, what: str) -> None:
        """Publish that `what` was given up, now or with a renewal; whoever looks after it goes on either way."""
        try:
            await self.publish(published)
        except RolloutBusError as error:
            log.warning("cannot publish yet that %s is given up (%s); a renewal does it", what, error)

    async def give_up(self, labels: Sequence[str]) -> None:
        """Take everything off the broker, and stop renewing; what another fleet has now is left alone."""
        await self.stop()
        published, self._published = self._published, None
        if self.held or published is not None:
            self.held = False
            version = published.version if published is not None else ""
            left = await self._transitions.remove(self._shards, labels, version)
            if left:
                log.warning(
                    "%d shards still hold groups; they wait on the broker for another fleet of this run, or expire",
                    left,
                )

    async def stop(self) -> None:
        """Stop renewing; the lease runs out by itself."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait({task})

    def _keep(self) -> None:
        self.held = True
        if self._task is None:
            self._task = asyncio.create_task(self._renew_for_ever(), name="fleet lease")

    async def _renew_for_ever(self) -> None:
        while self.held:
            await asyncio.sleep(self._link.settings.renew_every_s)
            try:
                await self._renew()
            except RolloutBusError as error:
                log.warning("the fleet cannot renew its lease (%s)", error)
            except Exception:  # a lease that ends unseen would give the run to another fleet
                log.exception("the fleet cannot renew its lease")

    async def _renew(self) -> None:
        version = self._published.version if self._published else ""
        renewal = await self._transitions.renew(self._shards, version)
        if renewal.status == "lost":
            self._lose(renewal.holder)
        elif renewal.status == "gone" and self._published is not None:
            await self._publish_again(self._published)
        for request in renewal.requests:
            if request.id in self._known:
                await self._transitions.answer_again(request)
            else:
                self._known.add(request.id)
                self._on_request(request)

    async def _publish_again(self, published: Published) -> None:
        log.warning("the broker does not have what the fleet published last; publishing it again")
        try:
            await self._transitions.publish(published)
        except FleetError as error:
            log.error("cannot publish it again: %s", error)

    def _lose(self, holder: str) -> None:
        self.held = False
        self._on_lost(holder.partition(" ")[2] or holder)


async def quietly(link: Link, limit_s: float, run: str, work: Awaitable[object]) -> None:
    """Do what the broker need not be there for, as its keys run out by themselves: within `limit_s`, and hardly waiting
    where it is known to be away.
    """
    try:
        async with asyncio.timeout(link.patience_s(limit_s)):
            await work
    except (RolloutBusError, TimeoutError) as error:
        why = str(error) or "no answer from the broker"
        log.warning("while ending the fleet of run %s: %s", run, why)

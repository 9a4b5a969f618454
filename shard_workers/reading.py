"""Reading new groups from a shard's stream, one at a time, in a way that can be stopped without losing a delivered one.

A blocking read is never cancelled: to stop it, another connection unblocks it, and what it returned is still handed on.
After every reconnect the consumer's own pending list is read first: a reply that was lost on the way sits there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..broker.channel import Channel, Link, ReplyError
from ..broker.errors import BrokerTimeoutError, BrokerUnavailableError
from ..broker.handshake import translate
from ..broker.outage import Outage
from ..broker.settings import BrokerSettings
from ..broker.worker_transitions import WorkerTransitions
from .slots import Slots

log = logging.getLogger("rolloutbus.worker")

RawEntry = Any
# One entry at a time shares a queue evenly among replicas. For groups that end faster than they can be read that costs
# a round trip each, so one more is read than have ended within this time, if none of them took longer than it.
SHORT_GROUP_S = 0.05
MOST_AT_ONCE = 32
# Of groups with large results this many: more of them push each other out of the processor's cache.
MOST_LARGE_AT_ONCE = 4
RESULTS_AT_ONCE = 1 << 20
# Unblocking races with the read's begin, so it is repeated until the read has returned.
_UNBLOCK_EVERY_S = 0.02


class GroupReader:
    """New entries for one consumer, and after a reconnect also those it was given before; the worker knows which it has
    in hand. `group_bytes` tells about how much a group's results are.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        control: Link,
        transitions: WorkerTransitions,
        purpose: str,
        group_bytes: Callable[[], float] = float,
    ) -> None:
        self._settings = settings
        self._control = control
        self._transitions = transitions
        self._purpose = purpose
        self._group_bytes = group_bytes
        self._channel: Channel | None = None
        self._reading = False
        self._reads = 0
        # About how many the last reads found.
        self._pace = 1
        # When short groups ended, the latest ones.
        self._short_ended: deque[float] = deque(maxlen=MOST_AT_ONCE)
        self._stopped = False
        # How many instances read this stream, two until that is known, and about how many groups wait on it.
        self.replicas = 2
        self.waiting = 0

    async def entries(self, slots: Slots) -> AsyncIterator[RawEntry]:
        """Deliver entries until `stop`, reading only while a slot is free; whoever gets one occupies the slot."""
        outage = Outage(log, self._purpose)
        while not self._stopped:
            await slots.any_free()
            try:
                ready = self._channel if self._channel is not None and not self._channel.broken else None
                got = await (self._read(ready, slots.free) if ready else self._connect())
                outage.over()
            except (BrokerUnavailableError, BrokerTimeoutError) as error:
                await outage.pause(error)
                continue
            self._pace = max(1, len(got), self._pace // 2)
            for entry in got:
                yield entry

    async def _connect(self) -> list[RawEntry]:
        """A new channel for blocking reads; returns what was delivered to this consumer before."""
        if self._channel is not None:
            await self._channel.close()
        self._channel = None
        channel = await Channel.open(self._settings, self._purpose, self._settings.block_s + 2.0)
        try:
            await self._transitions.prepare()
            pending = await self._transitions.unseen()
        except BaseException:
            await channel.close()
            raise
        self._channel = channel
        return pending

    async def _read(self, channel: Channel, free: int) -> list[RawEntry]:
        count = self._count(free)
        # A read that waits asks for one: others wait for the same queue, and may be idler.
        if count > 1 and (found := await self._ask(channel, count, None)):
            return found
        return await self._ask(channel, 1, int(self._settings.block_s * 1000))

    def _count(self, free: int) -> int:
        """How many groups to read at once, at most `free`: what waited here for a slot could run elsewhere. Of several
        replicas each takes its part of what waits, or two more than were there lately: the first one to see a burst
        leaves the others theirs.
        """
        since = time.monotonic() - SHORT_GROUP_S
        while self._short_ended and self._short_ended[0] < since:
            self._short_ended.popleft()
        if not self._short_ended:
            self._pace = 1
            return 1
        most = max(MOST_LARGE_AT_ONCE, int(RESULTS_AT_ONCE / max(self._group_bytes(), 1.0)))
        if self.replicas > 1:
            part = max(self.waiting // self.replicas, 2 + self._pace)
            most = min(most, part, 1 + len(self._short_ended))
        return min(free, most, MOST_AT_ONCE)

    async def _ask(self, channel: Channel, count: int, block_ms: int | None) -> list[RawEntry]:
        if self._stopped:
            return []
        self._reads += 1
        self._reading = True
        try:
            reply = (await channel.send([self._transitions.read_command(count, block_ms)]))[0]
        finally:
            self._reading = False
        if isinstance(reply, ReplyError):
            if str(reply).startswith(("NOGROUP", "UNBLOCKED")):
                await self._transitions.prepare()
                return []
            raise translate(reply, "the broker")
        return reply[0][1] if reply else []

    def group_ended(self, seconds: float) -> None:
        """A group that was read here has ended after `seconds`."""
        if seconds < SHORT_GROUP_S:
            self._short_ended.append(time.monotonic())

    async def stop(self) -> None:
        """No read begins any more; one that waits returns at once, and what it got is delivered."""
        self._stopped = True
        await self.interrupt()

    async def interrupt(self) -> None:
        """A read that waits returns at once; what it got is delivered."""
        channel, read = self._channel, self._reads
        while self._reading and self._reads == read and channel is not None and not channel.broken:
            try:
                control = await self._control.channel()
                await control.pipeline([("CLIENT", "UNBLOCK", channel.hello.client_id)])
            except (BrokerUnavailableError, BrokerTimeoutError):
                channel.abort()
            await asyncio.sleep(_UNBLOCK_EVERY_S)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

"""The thread and event loop that a client owns: all its network work happens here, whoever calls from wherever.

It holds the client's lease, reads results, publishes, sweeps, and survives a broker's restart. Its end, wanted or not, ends every
batch with an error instead of a wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..broker.channel import Channel, Command, Link
from ..broker.client_transitions import ClientTransitions
from ..broker.errors import ClientNameTakenError, ClosedError, OwnershipLostError, RolloutBusError
from ..broker.keys import Keys, check_name
from ..broker.scripts import load_scripts
from ..broker.settings import BrokerSettings
from ..collector import Collector
from ..collector.sweep import Sweeper
from ..producer import Producer, RouteMap, read_route_map, wait_for_route_map
from .session import Ended, SessionRunner

log = logging.getLogger("rolloutbus.trainer")

Result = TypeVar("Result")
# Keys are renewed this many times within their TTL.
_TTL_RENEWALS = 20


class _ChannelRunner:
    """Steps over a channel that is just being set up."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def run(self, commands: list[Command]) -> list[Any]:
        return await self._channel.pipeline(commands)


class Engine:
    """One client's thread. `start` and `stop` may be called from anywhere; `call` and `post` after `start`."""

    def __init__(self, settings: BrokerSettings, run: str, client: str, *, fleet_wait_s: float, name_wait_s: float) -> None:
        self.settings = settings
        self.keys = Keys(run)
        self.client = check_name("client", client)
        self.incarnation = secrets.token_hex(8)
        self.route_map = RouteMap()
        self._fleet_wait_s = fleet_wait_s
        self._name_wait_s = name_wait_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready: Future[None] = Future()
        self._stop: asyncio.Event | None = None
        self._failed: BaseException | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._failed is None

    def start(self) -> Future[None]:
        """Begin; the future is done when connected, or carries what went wrong."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=f"rolloutbus-{self.client}", daemon=True)
            self._thread.start()
        return self._ready

    def stop(self) -> None:
        """End the thread, cancelling what is still open; returns when it is gone. Safe twice."""
        if self._thread is None:
            return
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:  # the loop ended between the two lines
                pass
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def call(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run `work` in the client's thread."""
        if self._loop is None or not self.running:
            work.close()
            raise ClosedError("this client is closed; make a new one") from self._failed
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, callback: Any, *args: Any) -> None:
        """Call something in the client's thread, later; dropped when the client has ended."""
        if self._loop is not None and self.running:
            try:
                self._loop.call_soon_threadsafe(callback, *args)
            except RuntimeError:  # ended meanwhile
                pass

    def _main(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self._failed = error
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.error("the client's thread ended: %s", error)

    async def _work(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        link = Link(self.settings, f"client:{self.client}", self._introduce)
        self.link = link
        self.transitions = ClientTransitions(link, self.keys, self.settings, self.client, self.incarnation)
        try:
            # The first connection fails at once instead of waiting for a broker that may have another address.
            await link.channel()
            self.route_map = await wait_for_route_map(link, self.keys, self._fleet_wait_s)
            await self._serve()
        finally:
            await link.close()

    async def _introduce(self, channel: Channel) -> None:
        """On every connection: scripts, and the client's name, which a restarted broker may have forgotten."""
        await load_scripts(channel)
        own = ClientTransitions(_ChannelRunner(channel), self.keys, self.settings, self.client, self.incarnation)  # pyright: ignore[reportArgumentType]
        deadline = time.monotonic() + (0.0 if self._ready.done() else self._name_wait_s)
        while left := await own.own():
            if time.monotonic() >= deadline:
                raise ClientNameTakenError(
                    f"client {self.client!r} of run {self.keys.run!r} belongs to another live process (its lease ends in {left / 1000:.0f} s "
                    "unless renewed); end that process, or give this one another client name"
                )
            await asyncio.sleep(min(0.2, left / 1000))

    async def _serve(self) -> None:
        self.collector = Collector(self.settings, self.keys, self.link, self.transitions, self._on_restart)
        producer = Producer(self.link, self.keys, self.settings, self.transitions)
        self.sessions = SessionRunner(self.link, self.transitions, producer, self.collector)
        self._restart_tasks: set[asyncio.Task[None]] = set()
        assert self._stop is not None
        duties = [
            asyncio.create_task(self.collector.run(), name="collector"),
            asyncio.create_task(self._renew_for_ever(), name="owner"),
            asyncio.create_task(self._sweep_for_ever(), name="sweep"),
        ]
        stop = asyncio.create_task(self._stop.wait())
        self._ready.set_result(None)
        try:
            done, _ = await asyncio.wait({*duties, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                self._failed = task.exception() or ClosedError(f"the client's {task.get_name()} ended")
        finally:
            await self._end(duties, stop)

    async def _end(self, duties: list[asyncio.Task[None]], stop: asyncio.Task[Any]) -> None:
        stop.cancel()
        error = self._failed or ClosedError("the client was closed while this batch was open; close the batch first")
        for session in list(self.sessions.sessions.values()):
            session.outbox.put(Ended(error))
            if self._failed is None:
                await self._quietly(self.sessions.close(session, complete=False))
        if self._failed is None:
            await self._quietly(self.collector.handed_over())
            await self._quietly(self.transitions.resign(self.collector.shards))
        for task in [*duties, *self._restart_tasks]:
            task.cancel()
        await asyncio.gather(*duties, *self._restart_tasks, return_exceptions=True)

    async def _quietly(self, work: Coroutine[Any, Any, Any]) -> None:
        """Clean up as far as the broker allows; what it does not allow expires by itself."""
        try:
            async with asyncio.timeout(self.settings.command_timeout_s):
                await work
        except (RolloutBusError, TimeoutError) as error:
            log.warning("client %s could not clean up after itself (%s); its keys expire", self.client, error)

    def _on_restart(self) -> None:
        task = asyncio.get_running_loop().create_task(self.sessions.republish(), name="republish")
        self._restart_tasks.add(task)
        task.add_done_callback(self._restart_tasks.discard)

    async def _renew_for_ever(self) -> None:
        keys_due = time.monotonic()
        while True:
            await asyncio.sleep(min(self.settings.renew_every_s, self.settings.lease_s / 3))
            if left := await self.transitions.own():
                raise OwnershipLostError(
                    f"another process took client {self.client!r} over while this one was away (lease left: {left} ms); this one ends"
                )
            if time.monotonic() >= keys_due:
                keys_due = time.monotonic() + self.settings.key_ttl_s / _TTL_RENEWALS
                await self._renew_keys()

    async def _renew_keys(self) -> None:
        names = [self.keys.results(self.client, shard) for shard in self.collector.shards]
        for batch in self.sessions.sessions:
            names += [self.keys.batch(batch), self.keys.accepted(batch)]
        if names:
            await self.link.run([("PEXPIRE", name, self.settings.key_ttl_ms) for name in names])

    async def _sweep_for_ever(self) -> None:
        sweeper = Sweeper(self.settings, self.keys, self.link, self.transitions)
        while True:
            await asyncio.sleep(self.settings.sweep_every_s)
            for session in list(self.sessions.sessions.values()):
                try:
                    await sweeper.sweep(session.watched)
                except RolloutBusError as error:
                    log.warning("cannot look after batch %s (%s)", session.batch, error)

    async def refresh_route_map(self) -> RouteMap:
        """Read the map again, for a route that is not in it yet."""
        found = await read_route_map(self.link, self.keys)
        if found is not None:
            self.route_map = found
        return self.route_map

"""The thread and event loop that a client owns: all its network work happens here, whoever calls from wherever.

It holds the client's lease, reads results, publishes, sweeps, and survives a broker's restart. Its end, wanted or not,
ends every batch with an error instead of a wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, NoReturn, TypeVar

from ..broker.channel import Channel, Command, Link
from ..broker.client_transitions import ClientTransitions
from ..broker.errors import (
    BrokerError,
    BrokerUnavailableError,
    ClosedError,
    OwnershipLostError,
    RolloutBusError,
    UsageError,
)
from ..broker.keys import Keys, check_name
from ..broker.messages import ForeignEntryError
from ..broker.scripts import load_scripts
from ..broker.settings import BrokerSettings
from ..collector import Collector
from ..collector.sweep import Sweeper
from ..producer import Producer, RouteMap, read_route_map, wait_for_route_map
from .forks import forks
from .naming import NameWait
from .session import Ended, SessionRunner

log = logging.getLogger("rolloutbus.trainer")

Result = TypeVar("Result")
# What a consumer acknowledges group by group reaches the broker in one step; nobody waits for it.
_POSTED_WITHIN_S = 0.01
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

    def __init__(
        self, settings: BrokerSettings, run: str, client: str, *, fleet_wait_s: float, name_wait_s: float | None
    ) -> None:
        self.settings = settings
        self.keys = Keys(run)
        self.client = check_name("client", client)
        self.incarnation = secrets.token_hex(8)
        self.route_map = RouteMap()
        self._fleet_wait_s = fleet_wait_s
        # One lease is what a process that died without a word leaves behind; a live one is not waited for.
        self._name_wait_s = settings.lease_s + 1.0 if name_wait_s is None else name_wait_s
        self._only_for_the_dead = name_wait_s is None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._posted_due = False
        self._ready: Future[None] = Future()
        self._stop: asyncio.Event | None = None
        self._failed: BaseException | None = None
        # Re-entrant: the last reference to a batch may be dropped, and so cancel it, at any moment.
        self._guard = threading.RLock()
        self._stop_asked = False
        self._forks = forks()
        self._calls: dict[Future[Any], tuple[Coroutine[Any, Any, Any], ...]] = {}

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a RolloutClient and its batches cannot be pickled or copied: a thread and connections of this process "
            "belong to them; send the broker's address, and make a client of another name there"
        )

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._failed is None

    @property
    def ended(self) -> bool:
        """Whether it was started and can do nothing any more."""
        # A thread that is just being started is not alive yet.
        with self._guard:
            return self._thread is not None and not self.running

    @property
    def inherited(self) -> bool:
        """Whether it was started in a process that this one was forked from. It has no thread here, and its locks may
        be held for ever.
        """
        return self._forks != forks() and self._thread is not None

    def start(self) -> Future[None]:
        """Begin; the future is done when connected, or carries what went wrong."""
        self.require_own()
        with self._guard:
            if self._stop_asked and self._ready.done() and not self._ready.exception():
                raise self._ended("is closed")
            if self._thread is None:
                if self._forks != forks():
                    # Made before a fork and used on both sides, it must not be the same owner twice.
                    self._forks, self.incarnation = forks(), secrets.token_hex(8)
                # A waiter that is cancelled must not cancel it for all.
                self._ready.set_running_or_notify_cancel()
                self._thread = threading.Thread(target=self._main, name=f"rolloutbus-{self.client}", daemon=True)
                self._thread.start()
        return self._ready

    def require_own(self) -> None:
        """Raise `ClosedError` in a forked process, where nobody would ever answer."""
        if self.inherited:
            raise ClosedError(
                "this client belongs to the process that this one was forked from; make a new one here, of another name"
            )

    def ask_to_stop(self) -> None:
        """Begin to end the thread, without waiting for it."""
        if self.inherited:
            return
        with self._guard:
            self._stop_asked = True
            loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            # Where the loop has ended there is nothing to stop.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)

    def stop(self) -> None:
        """End the thread, cancelling what is still open; returns when it is gone. Safe twice."""
        self.ask_to_stop()
        if not self.inherited and self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def patience_s(self) -> float:
        """How long whoever leaves waits for the broker."""
        return self.link.patience_s(self.settings.command_timeout_s)

    def call(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run `work` in the client's thread. What the thread's end leaves undone ends with `ClosedError`, never with a
        wait.
        """
        if self.inherited:
            work.close()
            self.require_own()
        with self._guard:
            if self._loop is None or not self.running:
                work.close()
                raise self._ended("is closed")
            guarded = self._finish_or_say(work)
            try:
                future = asyncio.run_coroutine_threadsafe(guarded, self._loop)
            except RuntimeError:  # the loop ended a moment ago
                guarded.close()
                work.close()
                raise self._ended("is closed") from None
            self._calls[future] = (guarded, work)
        future.add_done_callback(self._forget)
        return future

    async def _finish_or_say(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            self._call_posted()
            return await work
        except asyncio.CancelledError:
            if not self._stop_asked and self._failed is None:
                raise
            # The caller was not cancelled, and must not believe that it was.
            raise self._ended("was closed meanwhile") from None
        finally:
            work.close()

    def _ended(self, how: str) -> RolloutBusError:
        """Why nothing can be done any more: what ended this client, or that it was closed."""
        if self._failed is None:
            return ClosedError(f"this client {how}; make a new one")
        kind = BrokerUnavailableError if isinstance(self._failed, ConnectionError) else ClosedError
        return kind(f"this client has ended ({self._failed}); make a new one")

    def _forget(self, future: Future[Any]) -> None:
        with self._guard:
            self._calls.pop(future, None)

    def _end_calls(self) -> None:
        with self._guard:
            self._loop, left = None, list(self._calls.items())
        for future, coroutines in left:
            for coroutine in coroutines:
                coroutine.close()
            with contextlib.suppress(InvalidStateError):
                future.set_exception(self._ended("was closed meanwhile"))

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Call something in the client's thread, a moment later, but before what is asked of it by `call` from now on;
        dropped when the client has ended.

        Whatever is posted within that moment costs one wake-up, not one each.
        """
        loop = self._loop
        if loop is None or not self.running:
            return
        self._posted.append((callback, args))
        if not self._posted_due:
            self._posted_due = True
            # Where it ended meanwhile there is nobody to hear it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.call_later, _POSTED_WITHIN_S, self._call_posted)

    def _call_posted(self) -> None:
        # Lowered first: what is posted from now on wakes this thread again.
        self._posted_due = False
        while self._posted:
            callback, args = self._posted.popleft()
            callback(*args)

    def _main(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self._failed = error
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.error("the client's thread ended: %s", error)
        finally:
            self._end_calls()

    async def _work(self) -> None:
        with self._guard:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            if self._stop_asked:
                self._stop.set()
        link = Link(self.settings, f"client:{self.client}", self._introduce)
        self.link = link
        self.transitions = ClientTransitions(link, self.keys, self.settings, self.client, self.incarnation)
        self.collector = Collector(self.settings, self.keys, link, self.transitions, lambda: self.sessions.republish())
        producer = Producer(link, self.keys, self.settings, self.transitions)
        self.sessions = SessionRunner(link, self.transitions, producer, self.collector)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await self._connect(link, stop)
            await self._serve(stop)
        finally:
            stop.cancel()
            await self._end_tasks()
            await link.close()

    async def _end_tasks(self) -> None:
        """What is left ends here, and its outcome is told to whoever asked; the loop's own end would print it."""
        with self._guard:
            self._loop = None
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        # Batches that began while the client was closing, or ended by itself.
        for session in self.sessions.sessions.values():
            session.outbox.end(Ended(self._ended("was closed meanwhile")))

    async def _connect(self, link: Link, stop: asyncio.Task[Any]) -> None:
        connecting = asyncio.create_task(self._find_fleet(link))
        await asyncio.wait({connecting, stop}, return_when=asyncio.FIRST_COMPLETED)
        connecting.cancel()
        try:
            await connecting
        except BaseException as error:
            if link.current is not None:
                # Or this name would be taken for a lease, and a second try refused.
                await self._quietly(self.transitions.resign([]))
            if isinstance(error, asyncio.CancelledError):
                raise ClosedError("the client was closed while it was connecting") from None
            raise

    async def _find_fleet(self, link: Link) -> None:
        # The first connection fails at once instead of waiting for a broker that may have another address.
        await link.channel()
        # A fleet may come later than this client's name would last.
        renewing = asyncio.create_task(self._renew_for_ever())
        try:
            self.route_map = await wait_for_route_map(link, self.keys, self._fleet_wait_s)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _introduce(self, channel: Channel) -> None:
        """On every connection: scripts, and the client's name, which a restarted broker may have forgotten."""
        await load_scripts(channel)
        own = ClientTransitions(_ChannelRunner(channel), self.keys, self.settings, self.client, self.incarnation)  # pyright: ignore[reportArgumentType]
        first = not self._ready.done()
        try:
            await self._take_name(own, channel.hello.uptime_s, self._name_wait_s if first else 0.0)
        except asyncio.CancelledError:
            if first:
                # It may have the name without having been told so. Over the same connection, where this comes later.
                await self._quietly(own.resign([]))
            raise

    async def _take_name(self, own: ClientTransitions, uptime_s: float, wait_s: float) -> None:
        connected = time.monotonic()
        wait = NameWait(self.client, self.keys.run, wait_s, only_for_the_dead=self._only_for_the_dead)
        while left := await own.own(watched_s=uptime_s + time.monotonic() - connected):
            await wait.pause(left)

    async def _serve(self, stop: asyncio.Task[Any]) -> None:
        duties = [
            asyncio.create_task(self.collector.run(), name="collector"),
            asyncio.create_task(self._renew_for_ever(), name="owner"),
            asyncio.create_task(self._sweep_for_ever(), name="sweep"),
        ]
        self._ready.set_result(None)
        try:
            done, _ = await asyncio.wait({*duties, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                self._failed = task.exception() or ClosedError(f"the client's {task.get_name()} ended")
        finally:
            await self._end(duties)

    async def _end(self, duties: list[asyncio.Task[None]]) -> None:
        self._call_posted()
        error = self._failed or ClosedError("the client was closed while this batch was open; close the batch first")
        for session in list(self.sessions.sessions.values()):
            session.outbox.end(Ended(error))
            if self._failed is None:
                await self._quietly(self.sessions.close(session, complete=False))
        if self._failed is None:
            await self._quietly(self.collector.handed_over())
        # Before the name is given up: a renewal that comes after that would bring it back.
        for task in duties:
            task.cancel()
        await asyncio.gather(*duties, return_exceptions=True)
        if self._failed is None:
            await self._quietly(self.transitions.resign(self.collector.shards))

    async def _quietly(self, work: Coroutine[Any, Any, Any]) -> None:
        """Clean up as far as the broker allows; what it does not allow expires by itself."""
        try:
            async with asyncio.timeout(self.patience_s()):
                await work
        except (RolloutBusError, TimeoutError) as error:
            why = str(error) or "the broker does not answer"
            log.warning("client %s could not clean up after itself (%s); its keys expire", self.client, why)

    async def _renew_for_ever(self) -> None:
        keys_due = time.monotonic()
        while True:
            await asyncio.sleep(min(self.settings.renew_every_s, self.settings.lease_s / 3))
            if left := await self.transitions.own():
                raise OwnershipLostError(
                    f"another process took client {self.client!r} over while this one was away "
                    f"(lease left: {left} ms); this one ends"
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
        sweeper = Sweeper(self.settings, self.keys, self.link, self.transitions, self.collector.taken_in)
        while True:
            await asyncio.sleep(self.settings.sweep_every_s)
            for session in list(self.sessions.sessions.values()):
                self.sessions.look_after(session)
                try:
                    await sweeper.sweep(session.watched)
                except (BrokerError, ForeignEntryError) as error:
                    # The next look would find the same, and nobody would look after what else is out.
                    session.collection.error(error)
                except RolloutBusError as error:
                    log.warning("cannot look after batch %s (%s)", session.batch, error)

    async def refresh_route_map(self) -> RouteMap:
        """Read the map again, for a route that is not in it yet."""
        found = await read_route_map(self.link, self.keys)
        if found is not None:
            self.route_map = found
        return self.route_map

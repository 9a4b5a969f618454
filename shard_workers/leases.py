"""Renewing what an instance holds, from a thread of its own, so that an environment that blocks the event loop loses
nothing.

The renewal's answer also tells which groups were cancelled or taken over, and whether another process has the label
now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from ..broker.channel import Link
from ..broker.errors import RolloutBusError
from ..broker.keys import Keys
from ..broker.scripts import load_scripts
from ..broker.settings import BrokerSettings
from ..broker.worker_transitions import Attempt, HeldGroup, Identity, WorkerTransitions

log = logging.getLogger("rolloutbus.worker")

LostCallback = Callable[[str, str], None]
# A renewal that the broker sees after the instance has signed off makes its record again, until that expires.
_LAST_ANSWER_WITHIN_S = 1.0


class LeaseKeeper:
    """Renews each held attempt every `renew_every_s`. Callbacks run in the event loop that called `start`.

    `on_lost(token, status)`: the attempt is "lost" (taken over) or "gone" (cancelled). `on_replaced()`: stop, the label
    is another's.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        keys: Keys,
        identity: Identity,
        slots: int,
        on_lost: LostCallback,
        on_replaced: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._identity = identity
        self._slots = slots
        self._on_lost = on_lost
        self._on_replaced = on_replaced
        self._held: dict[str, HeldGroup] = {}
        self._lock = threading.Lock()
        self._stopped = self._under_way = False
        self._renewing: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._thread: threading.Thread | None = None
        self._owner: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to renew."""
        self._owner = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name=f"leases-{self._identity.label}", daemon=True)
        self._thread.start()

    def hold(self, attempt: Attempt) -> None:
        group = attempt.group
        with self._lock:
            self._held[attempt.token] = HeldGroup(group.batch, group.entry, group.group, attempt.token)

    def forget(self, attempt: Attempt) -> None:
        with self._lock:
            self._held.pop(attempt.token, None)

    async def stop(self) -> None:
        """End the thread, and wait a moment for the answer to a renewal that is under way; safe twice."""
        with self._lock:
            self._stopped, under_way = True, self._under_way
        if self._thread is None:
            return
        if under_way:
            await asyncio.to_thread(self._thread.join, _LAST_ANSWER_WITHIN_S)
        if self._renewing is not None:
            loop, task = self._renewing
            # Where the loop has ended there is nothing to cancel.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    def _main(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._renew_for_ever())

    async def _renew_for_ever(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._renewing = (asyncio.get_running_loop(), task)
        link = Link(self._settings, f"leases:{self._identity.label}", load_scripts)
        transitions = WorkerTransitions(link, self._keys, self._settings, self._identity)
        try:
            while self._begins():
                try:
                    await self._renew(link, transitions)
                except RolloutBusError as error:
                    log.warning("%s: cannot renew its leases (%s)", self._identity.label, error)
                except Exception:  # a thread that ends unseen would cost every group its lease
                    log.exception("%s: cannot renew its leases", self._identity.label)
                if self._was_last():
                    return
                await asyncio.sleep(self._settings.renew_every_s)
        finally:
            await link.close()

    def _begins(self) -> bool:
        with self._lock:
            self._under_way = not self._stopped
            return self._under_way

    def _was_last(self) -> bool:
        with self._lock:
            self._under_way = False
            return self._stopped

    async def _renew(self, link: Link, transitions: WorkerTransitions) -> None:
        with self._lock:
            held = list(self._held.values())
        observing = link.watched_for(self._settings.lease_s)
        answers = await transitions.renew(held, self._slots, observing=observing)
        if answers is None:
            self._stopped = True
            self._call(self._on_replaced)
            return
        for group, answer in zip(held, answers, strict=True):
            if answer != "ok":
                self._call(self._on_lost, group.token, answer)

    def _call(self, callback: Callable[..., None], *args: str) -> None:
        assert self._owner is not None
        try:
            self._owner.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the worker has ended, there is nobody to tell
            self._stopped = True

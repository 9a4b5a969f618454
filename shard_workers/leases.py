"""Renewing what an instance holds, from a thread of its own, so that an environment that blocks the event loop loses nothing.

The renewal's answer also tells which groups were cancelled or taken over, and whether another process has the label now.
"""

from __future__ import annotations

import asyncio
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


class LeaseKeeper:
    """Renews each held attempt every `renew_every_s`. Callbacks run in the event loop that called `start`.

    `on_lost(token, status)`: the attempt is "lost" (taken over) or "gone" (cancelled). `on_replaced()`: stop, the label is another's.
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
        self._stop = threading.Event()
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
        """End the thread; safe twice."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _main(self) -> None:
        asyncio.run(self._renew_for_ever())

    async def _renew_for_ever(self) -> None:
        link = Link(self._settings, f"leases:{self._identity.label}", load_scripts)
        transitions = WorkerTransitions(link, self._keys, self._settings, self._identity)
        pause = min(0.05, self._settings.renew_every_s)
        try:
            while not self._stop.is_set():
                try:
                    await self._renew(link, transitions)
                except RolloutBusError as error:
                    log.warning("%s: cannot renew its leases (%s)", self._identity.label, error)
                # The stop flag is a thread's; polling it costs nothing at this rate.
                for _ in range(round(self._settings.renew_every_s / pause)):
                    if self._stop.is_set():
                        break
                    await asyncio.sleep(pause)
        finally:
            await link.close()

    async def _renew(self, link: Link, transitions: WorkerTransitions) -> None:
        with self._lock:
            held = list(self._held.values())
        observing = link.watched_for(self._settings.lease_s)
        answers = await transitions.renew(held, self._slots, observing=observing)
        if answers is None:
            self._stop.set()
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
            self._stop.set()

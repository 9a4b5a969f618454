"""A thread with an event loop of its own, for work that must go on whatever the rest of the process does.

Its end ends every wait for it: what is cancelled then, and what has not begun or will not give way, raises
`ClosedError` where it is waited for, and never asyncio's `CancelledError`, which plain code does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from ...broker.errors import ClosedError

Result = TypeVar("Result")
# How long what is cancelled at the end may take to clean up after itself.
_GIVE_WAY_S = 1.0


class LoopThread:
    """Runs coroutines in its thread. Its end cancels what is left there."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        # What is asked for before `close` is in the loop before its stop.
        self._guard = threading.Lock()
        self._open: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._loop.is_closed()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start `work` and go on."""
        with self._guard:
            self._require_open(work)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._open[future] = work
        future.add_done_callback(self._forget)
        return future

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` and wait. An interrupt of the waiting thread cancels it and waits until it has cleaned up."""
        over: Future[asyncio.Task[Result]] = Future()
        tasks: list[asyncio.Task[Result]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(over.set_result)

        with self._guard:
            self._require_open(work)
            self._loop.call_soon_threadsafe(begin)
            self._open[over] = work
        over.add_done_callback(self._forget)
        try:
            return over.result().result()
        except asyncio.CancelledError:
            raise self._ended("was ended meanwhile") from None
        except BaseException:
            if not over.done():
                # Where the loop has ended, so has the work.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                # The caller must not go on while half of it still runs; a second interrupt breaks this wait.
                wait_for([over])
            raise

    def close(self) -> None:
        """End the thread; safe twice, and from the thread itself it only asks for the end."""
        with self._guard:
            if not self.alive:
                return
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _require_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._closing or not self.alive:
            work.close()
            raise self._ended("has ended")

    def _ended(self, how: str) -> ClosedError:
        return ClosedError(f"the thread {self._thread.name} {how}")

    def _forget(self, future: Future[Any]) -> None:
        with self._guard:
            self._open.pop(future, None)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            # A SystemExit in somebody's task leaves the loop; the other tasks have nothing to do with it.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        try:
            self._cancel_rest()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
            self._end_waits()

    def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks(self._loop)
        for task in rest:
            task.cancel()
        if not rest:
            return
        waiting = self._loop.create_task(asyncio.wait(rest, timeout=_GIVE_WAY_S))
        while not waiting.done():
            # As above.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(waiting)

    def _end_waits(self) -> None:
        with self._guard:
            left = list(self._open.items())
        for future, work in left:
            # It may refuse even that, and its caller have given up.
            with contextlib.suppress(RuntimeError):
                work.close()
            with contextlib.suppress(InvalidStateError):
                future.set_exception(self._ended("was ended meanwhile"))

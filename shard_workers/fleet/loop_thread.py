"""A thread with an event loop of its own, for work that must go on whatever the rest of the process does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ...broker.errors import ClosedError

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines in its thread. Its end cancels what is left there."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
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
        if not self.alive:
            work.close()
            raise ClosedError(f"the thread {self._thread.name} has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` and wait. An interrupt of the waiting thread cancels it and waits until it has cleaned up."""
        if not self.alive:
            work.close()
            raise ClosedError(f"the thread {self._thread.name} has ended")
        begun: Future[asyncio.Task[Result]] = Future()
        over: Future[asyncio.Task[Result]] = Future()

        def begin() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(over.set_result)
            begun.set_result(task)

        self._loop.call_soon_threadsafe(begin)
        try:
            return over.result().result()
        except BaseException:
            if not over.done():
                self._loop.call_soon_threadsafe(begun.result().cancel)
                # The caller must not go on while half of it still runs; a second interrupt breaks this wait.
                over.result()
            raise

    def close(self) -> None:
        """End the thread; safe twice, and from the thread itself it only asks for the end."""
        if not self.alive:
            return
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            # A SystemExit in somebody's task leaves the loop; the other tasks have nothing to do with it.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        self._cancel_rest()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks(self._loop)
        for task in rest:
            task.cancel()
        if rest:
            self._loop.run_until_complete(asyncio.wait(rest, timeout=1.0))

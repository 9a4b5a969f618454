"""Ctrl-C and SIGTERM: the first asks the command to clean up and end, the second ends it at once.

Asking means `KeyboardInterrupt` with the exit code in plain code, and cancellation of the work in asyncio code. Ending
at once leaves nothing behind either: a local Ray is killed, and the embedded broker's supervisor sees its program end
and cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

from .console import say

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# For commands that have batches out.
CANCELLING = "stopping, and cancelling what is out; once more to stop at once"
_LOOKED_AFTER_S = 0.5

Result = TypeVar("Result")


class Interrupts:
    """A context manager for the main thread; elsewhere it leaves signals, and `signal.signal`, alone."""

    def __init__(self, stopping: str = "stopping; once more to stop at once") -> None:
        self._stopping = stopping
        self._code = 0
        self._held = False
        self._before: dict[signal.Signals, Any] = {}
        self._cancel: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _install(self) -> None:
        if _in_main_thread():
            for number in _SIGNALS:
                before = signal.signal(number, self._handle)
                self._before.setdefault(number, before)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """While it lasts the first signal waits for its end, for code that an exception in its middle would crash.

        Nor can that code take the signals: a handler of Ray's ends the program wherever its start has come to.
        """
        self._held = True
        try:
            with _signals_kept():
                yield
        finally:
            self._held = False
            # Ray's C++ half has put a handler below Python's, which prints a stack before it comes to ours.
            self._install()
            # Also in the place of an error, which may well come of a signal that others of the program got too.
            if self._code:
                raise KeyboardInterrupt(self._code)

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """`asyncio.run` of what `work` makes; a signal cancels it, and once it has cleaned up `KeyboardInterrupt` is
        raised.
        """

        async def attached() -> Result:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None
            self._cancel = lambda: loop.call_soon_threadsafe(self._stop, task)
            try:
                return await work()
            finally:
                self._cancel = None

        try:
            return asyncio.run(attached())
        except asyncio.CancelledError:
            # Something else than a signal cancelled it, and exit code 0 would say that all is well.
            if not self._code:
                raise
            raise KeyboardInterrupt(self._code) from None

    def wait(self, look: Callable[[], object], every_s: float = 1.0) -> None:
        """Wait for a signal, which raises `KeyboardInterrupt`; calls `look` meanwhile, which may raise what ends the
        wait.
        """
        never = threading.Event()
        while not never.wait(every_s):
            look()

    @contextlib.contextmanager
    def needing(self, is_gone: Callable[[], bool], told: str) -> Generator[None]:
        """Where what a clean end needs is gone after a signal, because others got it too, the command says so and ends
        at once.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_LOOKED_AFTER_S):
                if self._code and is_gone():
                    say(told, "red")
                    self._end_at_once()

        watching = threading.Thread(target=watch, name="needed", daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()

    def _end_at_once(self) -> NoReturn:
        kill_descendants()
        os._exit(self._code)

    def _stop(self, task: asyncio.Task[Any]) -> None:
        # Said here and not in the handler, which may have interrupted the drawing of a progress bar.
        say(self._stopping)
        task.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._code:
            self._code = 128 + number
            self._end_at_once()
        self._code = 128 + number
        if self._cancel is not None:
            self._cancel()
            return
        say(self._stopping)
        if not self._held:
            raise KeyboardInterrupt(self._code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _signals_kept() -> Generator[None]:
    """Whoever sets a handler for one of ours meanwhile is not heeded. Only the main thread can set one."""
    if not _in_main_thread():
        yield
        return
    genuine = signal.signal

    # Its parameters are named as the genuine one's, or a call by keyword would fail.
    def refuse(signalnum: int, handler: Any) -> Any:
        return signal.getsignal(signalnum) if signalnum in _SIGNALS else genuine(signalnum, handler)

    signal.signal = refuse
    try:
        yield
    finally:
        signal.signal = genuine


def kill_descendants() -> None:
    """SIGKILL to every process below this one, but for sessions of their own, whose leaders watch this process
    themselves.

    Parts of a local Ray outlive their raylet by half a minute and more otherwise. Does nothing where there is no /proc.
    """
    parents, own_session = _parents(), os.getsid(0)
    below = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= found
    for pid in below - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == own_session:
                os.kill(pid, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Process id → its parent's, of all processes."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # The name before it may contain anything, parentheses too.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents

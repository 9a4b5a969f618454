"""The small process that stands between a program and its embedded server.

It owns the server and the server's folder, and promises that neither outlives the program: when the program ends in
whatever way, the server gets SIGTERM, then SIGKILL, and what must not stay behind is removed. It runs as a script of
its own, imports only the standard library, and is told everything in its arguments:

    supervisor.py FOLDER {private|shared} GRACE_SECONDS SERVER_BINARY CONFIG_FILE

Standard input carries the orders `start`, `stop`, `kill` and `leave`, one a line; its end means that the program is
gone. Standard output carries the answers `started PID`, `failed REASON`, `locked` and `exited STATUS`. The server
writes to standard error, which is the log.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

PRIVATE: Final = "private"
SHARED: Final = "shared"
SOCKET_NAME: Final = "sock"
CONFIG_NAME: Final = "broker.conf"

# A program's death ends our input, unless a forked child of it still holds the pipe: so look at our parent too.
PARENT_CHECK_S: Final = 0.5
# Nobody waits for an orphan's clean shutdown, and whoever starts the program again wants the address back.
ORPHAN_GRACE_S: Final = 1.0
# A server whose supervisor was killed dies a moment after it and holds the folder's lock until then.
LOCK_PATIENCE_S: Final = 2.0
PR_SET_PDEATHSIG: Final = 1
# An allocator that hands large freed blocks back at once takes them again page by page with the next large rows, which
# costs a third of the rate at 1 MB rows (measured). So jemalloc (as distributions build it, and as Redis brings it)
# may give pages back only lazily, and glibc keeps some. What is set already is left as it is.
ALLOCATOR: Final = {
    "MALLOC_CONF": "muzzy_decay_ms:-1",
    "JE_MALLOC_CONF": "muzzy_decay_ms:-1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


class Order(NamedTuple):
    """What the arguments say."""

    folder: Path
    disposal: str
    grace_s: float
    command: list[str]

    @classmethod
    def parse(cls, arguments: list[str]) -> Order:
        folder, disposal, grace, binary, config = arguments
        return cls(Path(folder), disposal, float(grace), [binary, config])


def death_signal_setter() -> Callable[[], None] | None:
    """What makes the server die with us even if we get SIGKILL; its process calls it before it becomes the server."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (ImportError, OSError, AttributeError):
        return None
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os.kill(os.getpid(), signal.SIGKILL)

    return die_with_supervisor


def wakeup_pipe() -> int:
    """Make signals readable: returns a descriptor which becomes readable whenever one arrives."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A child's end only has to wake the select."""


class Supervisor:
    """One server, one folder, one parent."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._server: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._parent = os.getppid()
        self._leaving = False
        self._pending = b""
        self._wakeup = wakeup_pipe()
        signal.signal(signal.SIGCHLD, _ignore)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_to_leave)

    def run(self) -> None:
        """Obey until the parent is done or gone, then leave nothing."""
        while not self._leaving:
            ready, _, _ = select.select([0, self._wakeup], [], [], PARENT_CHECK_S)
            if self._wakeup in ready:
                self._drain_wakeups()
            self._reap()
            orphaned = os.getppid() != self._parent
            if orphaned or (0 in ready and not self._read_orders()):
                break
        self._end_server(self._order.grace_s if self._leaving else ORPHAN_GRACE_S)
        self._clean_up()

    def _ask_to_leave(self, *_: object) -> None:
        self._leaving = True

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 512):
                pass

    def _read_orders(self) -> bool:
        """Obey what has arrived; False at the end of the input."""
        chunk = os.read(0, 4096)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self._obey(line.decode("ascii", "replace"))
        return bool(chunk)

    def _obey(self, order: str) -> None:
        self._reap()
        if order == "start":
            self._start()
        elif order == "stop":
            self._end_server(self._order.grace_s)
        elif order == "kill":
            self._end_server(0.0)
        elif order == "leave":
            self._leaving = True

    def _start(self) -> None:
        if self._server is not None:
            self._say(f"started {self._server.pid}")
            return
        if not self._take_lock():
            self._say("locked")
            return
        try:
            self._server = self._spawn()
        except (OSError, subprocess.SubprocessError) as error:
            self._say(f"failed {error}".replace("\n", " "))
            return
        self._say(f"started {self._server.pid}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        held = () if self._lock is None else (self._lock,)
        return subprocess.Popen(
            self._order.command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            env={**ALLOCATOR, **os.environ},
            # The server inherits the lock: as long as it lives, even without us, nobody else starts on its files.
            pass_fds=held,
            preexec_fn=death_signal_setter(),
        )

    def _take_lock(self) -> bool:
        """Hold the folder; two servers on one append-only file would destroy it."""
        # Here and not above, so that a platform without it can import the product and be told what it lacks.
        import fcntl

        if self._lock is not None:
            return True
        descriptor = os.open(self._order.folder, os.O_RDONLY)
        give_up = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up:
                    os.close(descriptor)
                    return False
                time.sleep(0.02)
            else:
                self._lock = descriptor
                return True

    def _reap(self) -> None:
        server = self._server
        if server is not None and server.poll() is not None:
            self._server = None
            self._say(f"exited {server.returncode}")

    def _end_server(self, grace_s: float) -> None:
        server = self._server
        if server is None:
            return
        if grace_s > 0:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(grace_s)
        server.kill()
        server.wait()
        self._reap()

    def _clean_up(self) -> None:
        if self._order.disposal == PRIVATE:
            shutil.rmtree(self._order.folder, ignore_errors=True)
            return
        # In a folder that stays, the password must not; without the lock these files are another server's.
        if self._lock is not None:
            for name in (SOCKET_NAME, CONFIG_NAME):
                (self._order.folder / name).unlink(missing_ok=True)

    @staticmethod
    def _say(answer: str) -> None:
        with contextlib.suppress(OSError):
            os.write(1, answer.encode() + b"\n")


if __name__ == "__main__":
    Supervisor(Order.parse(sys.argv[1:])).run()

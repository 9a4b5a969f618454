"""The program's end of the pipe to its embedded server's supervisor.

It starts `supervisor.py`, sends it orders and reads its answers. The pipe is closed on exec, so no other child of the
program keeps it open, and the supervisor lives in a session of its own, so a Ctrl-C in the terminal reaches the program
alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import IO, Final, NamedTuple

_SCRIPT: Final = Path(__file__).with_name("supervisor.py")


class Answer(NamedTuple):
    """`started`, `failed`, `locked` or `exited` with its detail, or `gone` when the supervisor itself has ended."""

    kind: str
    detail: str


class SupervisorLink:
    """A running supervisor. `server_pid` is what it last said, None while no server runs."""

    def __init__(self, folder: Path, disposal: str, grace_s: float, command: list[str], log: Path) -> None:
        arguments = [str(folder), disposal, str(grace_s), *command]
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                # Isolated and without site packages, it starts in a few milliseconds whatever is installed.
                [sys.executable, "-I", "-S", str(_SCRIPT), *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                cwd="/",
                start_new_session=True,
                # A server refuses to start in a locale which the machine does not have.
                env={**os.environ, "LC_ALL": "C"},
            )
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin
        self._answers = self._process.stdout
        # A Popen that is dropped while its process runs keeps its pipes open, and with them the server alive.
        weakref.finalize(self, _close, self._orders, self._answers)
        # Not select(), which takes no descriptor beyond 1023, and a trainer may have thousands of files open.
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._pending = b""
        self._gone = False
        self.server_pid: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        return self._gone

    def order(self, word: str) -> None:
        """Send an order; one that finds nobody shows as the answer `gone`."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(f"{word}\n".encode("ascii"))

    def answer(self, timeout_s: float) -> Answer | None:
        """The next answer, or None when none comes within the time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if self._gone:
                return Answer("gone", "")
            if not self._poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))):
                return None
            chunk = self._answers.read(4096)
            self._pending += chunk or b""
            self._gone = not chunk
        line, self._pending = self._pending.split(b"\n", 1)
        kind, _, detail = line.decode("utf-8", "replace").partition(" ")
        self._note(kind, detail)
        return Answer(kind, detail)

    def drain(self) -> None:
        """Take in what the supervisor has said so far."""
        while (answer := self.answer(0.0)) is not None and answer.kind != "gone":
            pass
        if self._gone:
            self.server_pid = None

    def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait until the server has ended; False when it has not within the time."""
        deadline = time.monotonic() + timeout_s
        while self.server_pid is not None and not self._gone:
            if self.answer(deadline - time.monotonic()) is None:
                return False
        self.drain()
        return True

    def leave(self, timeout_s: float) -> bool:
        """Let the supervisor end the server, clean up and end; False when it had to be killed or had been."""
        self.order("leave")
        self._orders.close()
        try:
            clean = self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            clean = False
        self._answers.close()
        return clean

    def _note(self, kind: str, detail: str) -> None:
        if kind == "started":
            self.server_pid = int(detail)
        elif kind == "exited":
            self.server_pid = None


def _close(*pipes: IO[bytes]) -> None:
    for pipe in pipes:
        pipe.close()

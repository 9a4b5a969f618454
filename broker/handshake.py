"""How a connection begins: address, TLS, authentication, name, and what the server says of itself.

Errors of sockets and servers become ours here: unreachable, wrong password, too old, or simply refused.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from .errors import (
    BrokerAuthError,
    BrokerError,
    BrokerFullError,
    BrokerUnavailableError,
    BrokerVersionError,
    ConfigError,
)
from .settings import redacted
from .sockets import SocketTransport, connect_socket
from .wording import did_you_mean

if TYPE_CHECKING:
    from .channel import Channel

OLDEST_SERVER = (7, 0)
# A server that answers so is not wrong, only not ready: the caller waits and tries again.
# MISCONF: it cannot write to its disk. NOREPLICAS: too few copies of it are connected.
NOT_READY = (
    "LOADING", "MASTERDOWN", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "MISCONF", "NOREPLICAS",
    "ERR max number of clients",
)  # fmt: skip
_TLS_KEYS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})
_QUERY_KEYS = frozenset({"db", "password"}) | _TLS_KEYS
_NOT_ALLOWED = ("WRONGPASS", "NOAUTH", "NOPERM", "ERR invalid password", "ERR Client sent AUTH")


@dataclass(frozen=True, slots=True)
class Hello:
    """What the server told at the beginning of a connection."""

    run_id: str = ""
    version: str = ""
    uptime_s: float = 0.0
    client_id: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a broker URL: `redis://`, `rediss://` (TLS) or `unix://`."""

    host: str
    port: int
    path: str | None
    username: str
    password: str | None
    database: int
    tls: ssl.SSLContext | None


def parse_address(url: str) -> Address:
    """Split a broker URL; raises `ConfigError` for what is none.

    Query keys: `db`, `password`, and under `rediss://` also `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and
    `ssl_cert_reqs` (`required` or `none`).
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"broker url {redacted(url)!r}: {error}") from None
    query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(f"broker url {redacted(url)!r}: the scheme must be redis://, rediss:// or unix://")
    if parts.scheme == "unix" and not parts.path:
        raise ConfigError(f"broker url {redacted(url)!r}: it names no socket; write unix:///path/to/socket")
    try:
        database = int(query.get("db") or (parts.path.strip("/") if parts.scheme != "unix" else "") or 0)
        port = parts.port or 6379
    except ValueError:
        raise ConfigError(
            f"broker url {redacted(url)!r}: port and database must be numbers, "
            "and special characters in a password escaped (%2F for /)"
        ) from None
    _refuse_what_would_be_ignored(parts, query)
    return Address(
        host=parts.hostname or "127.0.0.1",
        port=port,
        path=unquote(parts.path) if parts.scheme == "unix" else None,
        username=unquote(parts.username or ""),
        password=unquote(parts.password) if parts.password is not None else query.get("password") or None,
        database=database,
        tls=_tls_context(query) if parts.scheme == "rediss" else None,
    )


def _refuse_what_would_be_ignored(parts: SplitResult, query: dict[str, str]) -> None:
    """Whoever asks for TLS in words that nobody reads would speak in plain text. No message shows a value."""
    unknown = sorted(query.keys() - _QUERY_KEYS)
    # Parts of a password whose ? or # is not escaped.
    if parts.fragment or (unknown and "@" in parts.query):
        raise ConfigError("broker url: special characters in it must be escaped (%23 for #, %3F for ?)")
    if unknown:
        key, known = unknown[0], sorted(_QUERY_KEYS)
        raise ConfigError(
            f"broker url: {key!r} is no key of its query{did_you_mean(key, known)}; known are {', '.join(known)}"
        )
    if parts.scheme == "unix" and parts.hostname:
        raise ConfigError("broker url: unix:// names a socket and no host; write three slashes, unix:///path/to/socket")
    tls = sorted(query.keys() & _TLS_KEYS)
    if tls and parts.scheme != "rediss":
        raise ConfigError(f"broker url: {tls[0]} is for TLS, which {parts.scheme}:// does not speak; use rediss://")
    if query.get("ssl_cert_reqs", "required") not in ("required", "none"):
        raise ConfigError("broker url: ssl_cert_reqs must be required or none")
    if "ssl_keyfile" in query and "ssl_certfile" not in query:
        raise ConfigError("broker url: ssl_keyfile needs ssl_certfile beside it")


def _tls_context(query: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs") or None)
        if query.get("ssl_certfile"):
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile") or None)
    except OSError as error:
        raise ConfigError(
            f"broker url: its TLS files cannot be read ({error}); check ssl_ca_certs, ssl_certfile, ssl_keyfile"
        ) from None
    if query.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def open_transport(url: str, channel: Channel) -> None:
    """Connect `channel` to the address of `url`."""
    address = parse_address(url)
    try:
        if address.tls is not None:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: channel, address.host, address.port, ssl=address.tls)
        else:
            channel.attach(SocketTransport(await connect_socket(address.host, address.port, address.path), channel))
    except UnicodeError:
        raise ConfigError(f"broker url {redacted(url)!r}: {address.host!r} cannot be a host's name") from None


async def greet(url: str, channel: Channel, purpose: str) -> Hello:
    """Authenticate, name the connection, and check that the server is one that rolloutbus works with."""
    address = parse_address(url)
    if address.password is not None:
        names = (address.username,) if address.username else ()
        await _ask(channel, url, "AUTH", *names, address.password)
    if address.database:
        await _ask(channel, url, "SELECT", address.database)
    await _ask(channel, url, "CLIENT", "SETNAME", f"rolloutbus:{purpose}")
    client_id, info = await _ask(channel, url, "CLIENT", "ID"), await _ask(channel, url, "INFO", "server")
    text = info.decode(errors="replace") if isinstance(info, bytes) else ""
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    _check_version(facts, url)
    return Hello(
        facts.get("run_id", ""),
        facts.get("redis_version", ""),
        float(facts.get("uptime_in_seconds", 0)),
        client_id,
    )


async def _ask(channel: Channel, url: str, *command: str | int) -> Any:
    """One reply; an error names the address, because nobody has seen it work yet."""
    reply = (await channel.pipeline([command]))[0]
    if isinstance(reply, Exception):
        raise translate(reply, url)
    return reply


def _check_version(facts: dict[str, str], url: str) -> None:
    numbers = tuple(int(part) for part in facts.get("redis_version", "0.0").split(".")[:2] if part.isdigit())
    if numbers < OLDEST_SERVER:
        raise BrokerVersionError(
            f"the broker at {redacted(url)} is version {facts.get('redis_version', 'unknown')}; "
            "rolloutbus needs Redis 7.0 or newer, "
            "or Valkey 8 or newer"
        )


def translate(error: Any, where: str) -> Exception:
    """One of our errors for what a socket or a server said; `where` is the address or what was asked."""
    text, place = str(error) or type(error).__name__, redacted(where)
    refused = f"{where if where == 'the broker' else 'the broker at ' + place} refused: {text}"
    if isinstance(error, ssl.SSLError):
        return BrokerAuthError(
            f"TLS with the broker at {place} failed ({text}); check ssl_ca_certs and the server's certificate"
        )
    if isinstance(error, TimeoutError) and not isinstance(error, ConnectionError):
        return BrokerUnavailableError(f"no answer from the broker at {place}; check address and firewall")
    if isinstance(error, OSError):
        return BrokerUnavailableError(
            f"cannot reach the broker at {place} ({text}); check that it runs and that the address is right"
        )
    if text.startswith(NOT_READY):
        return BrokerUnavailableError(f"the broker is not ready ({text})")
    if text.startswith("OOM"):
        return BrokerFullError(
            f"the broker refused to store more ({text}); raise maxmemory, free memory, or let the trainer consume"
        )
    if text.startswith(_NOT_ALLOWED):
        return BrokerAuthError(f"{refused}; check user, password and ACL rules")
    return BrokerError(refused)

"""One question to a server that has just been started: are you up, and are you the one that I started?

Asked over a plain socket of the standard library, so that it costs no client and can be repeated every few
milliseconds. The second half matters on a TCP port, where another server may have taken the port in between and would
answer a PING just as well.
"""

from __future__ import annotations

import contextlib
import enum
import re
import socket
import time

from .server_config import LOOPBACK, Address


class Readiness(enum.Enum):
    SILENT = "silent"
    LOADING = "loading"
    READY = "ready"


def probe(address: Address, password: str | None, server_pid: int, deadline: float) -> Readiness:
    """Ask once; never raises, and returns by `deadline` (of the monotonic clock) or within a second."""
    request = (
        (encode_command("AUTH", password) if password else b"")
        + encode_command("PING")
        + encode_command("INFO", "server")
    )
    with contextlib.suppress(OSError), _connect(address) as connection:
        connection.sendall(request)
        return judge(_read_reply(connection, min(deadline, time.monotonic() + 1.0)), server_pid)
    return Readiness.SILENT


def judge(reply: bytes, server_pid: int) -> Readiness:
    """What the replies to PING and INFO mean."""
    if b"-LOADING" in reply:
        return Readiness.LOADING
    if b"+PONG" in reply and f"process_id:{server_pid}\r".encode() in reply:
        return Readiness.READY
    return Readiness.SILENT


def encode_command(*words: str) -> bytes:
    """A command in the form that the server reads, whatever bytes its words contain."""
    encoded = [word.encode("utf-8", "surrogateescape") for word in words]
    parts = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)]
    return b"".join(parts)


def _connect(address: Address) -> socket.socket:
    if address.socket is None:
        return socket.create_connection((LOOPBACK, address.port), timeout=0.25)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(0.25)
        connection.connect(str(address.socket))
    except OSError:
        connection.close()
        raise
    return connection


def _read_reply(connection: socket.socket, deadline: float) -> bytes:
    reply = b""
    while not re.search(rb"process_id:\d+\r|-NOAUTH|-WRONGPASS|-LOADING", reply) and time.monotonic() < deadline:
        chunk = connection.recv(4096)
        if not chunk:
            break
        reply += chunk
    return reply

"""A socket that writes several buffers in one system call, without joining them and without moving what is left.

asyncio's own transport joins a list of buffers (before Python 3.12) and copies what the kernel did not take at once,
again after each partial write; at 1 MB rows that is most of the time. TLS connections still go through asyncio's
transport.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

# The kernel takes up to 1024 (IOV_MAX on Linux and macOS), but no more bytes than the socket's buffer holds, and each
# buffer that it did not take was prepared in vain.
_BUFFERS_PER_CALL = 32
_SOCKET_BUFFER = 1 << 20
HIGH_WATER = 4 << 20
# A large reply comes in pieces, the server's turns; where the event loop is busy, several are there already.
_READS_PER_TURN = 8


class Receiver(Protocol):
    """What a connection tells: the part of `asyncio.BufferedProtocol` that is used here."""

    def get_buffer(self, sizehint: int = -1) -> memoryview: ...
    def buffer_updated(self, nbytes: int) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class SocketTransport:
    """A connected non-blocking socket, driven by the running event loop."""

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._receiver = receiver
        self._queue: deque[bytes | memoryview] = deque()
        self._queued = 0
        self._paused = False
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._read)

    def writelines(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Write now what the kernel takes, the rest as it makes room; the buffers, of bytes, must not change until
        then.
        """
        if self._closed:
            return
        idle = not self._queue
        # An empty one would never count as sent.
        self._queue.extend(filter(len, buffers))
        self._queued += sum(map(len, buffers))
        if idle and self._queue:
            self._write()
            if self._queue:
                self._loop.add_writer(self._socket.fileno(), self._write)
        if self._queued > HIGH_WATER and not self._paused:
            self._paused = True
            self._receiver.pause_writing()

    def abort(self) -> None:
        """Close at once; `connection_lost` follows."""
        self._close(None)

    def _write(self) -> None:
        try:
            while self._queue:
                self._advance(self._socket.sendmsg(list(itertools.islice(self._queue, _BUFFERS_PER_CALL))))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._close(error)
            return
        if not self._queue:
            self._loop.remove_writer(self._socket.fileno())
        if self._paused and self._queued <= HIGH_WATER // 4:
            self._paused = False
            self._receiver.resume_writing()

    def _advance(self, sent: int) -> None:
        self._queued -= sent
        while sent:
            head = self._queue[0]
            if sent < len(head):
                self._queue[0] = memoryview(head)[sent:]
                return
            sent -= len(head)
            self._queue.popleft()

    def _read(self) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                space = self._receiver.get_buffer()
                count = self._socket.recv_into(space)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._close(error)
                return
            if not count:
                self._close(None)
                return
            self._receiver.buffer_updated(count)
            # Less than there was space for: nothing more is there.
            if count < len(space) or self._closed:
                return

    def _close(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._queue.clear()
        self._socket.close()
        self._loop.call_soon(self._receiver.connection_lost, error)


async def connect_socket(host: str, port: int, path: str | None) -> socket.socket:
    """A connected, non-blocking socket to a Unix path or a TCP address; raises `OSError`."""
    if path is not None:
        return await _connect(socket.AF_UNIX, path)
    loop = asyncio.get_running_loop()
    errors: list[OSError] = []
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            sock = await _connect(family, address)
        except OSError as error:
            errors.append(error)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    raise errors[0] if errors else OSError(f"no address for {host}")


async def _connect(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        await asyncio.get_running_loop().sock_connect(sock, address)  # pyright: ignore[reportArgumentType]
    except BaseException:
        sock.close()
        raise
    return sock

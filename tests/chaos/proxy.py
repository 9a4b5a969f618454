"""A proxy between one process and the broker that misbehaves on order: silent, resetting, or slow.

Silent: connections stay open and no byte of them arrives any more, as behind a firewall that dropped its state; they
stay so for ever, new ones only until `heal`. Reset: connections are cut and new ones refused. Slow: every piece waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

CHUNK = 64 * 1024
LINGER_NOT = struct.pack("ii", 1, 0)


class Proxy:
    """One listening address on the loopback in front of the broker at `target`."""

    def __init__(self, target: str, dice: random.Random) -> None:
        self._target = urlsplit(target)
        self._dice = dice
        self._mode = "pass"
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        secret = f":{self._target.password}@" if self._target.password else ""
        self.url = urlunsplit(("redis", f"{secret}127.0.0.1:{port}", "", "", ""))

    def misbehave(self, mode: str) -> None:
        """From now on be `silent`, `reset` or `slow`."""
        self._mode = mode
        for pair in self._pairs:
            pair.muted = pair.muted or mode == "silent"
            if mode == "reset":
                pair.cut()

    def heal(self) -> None:
        self._mode = "pass"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for pair in list(self._pairs):
            pair.cut()
        await asyncio.gather(*(pair.task for pair in self._pairs if pair.task is not None), return_exceptions=True)

    def _delay(self) -> float:
        return self._dice.uniform(0.01, 0.3) if self._mode == "slow" else 0.0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = _Pair(writer, muted=self._mode == "silent")
        pair.task = asyncio.current_task()
        self._pairs.add(pair)
        try:
            if self._mode != "reset":
                await self._join(pair, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            pair.cut()
            self._pairs.discard(pair)

    async def _join(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await self._connect()
        pair.there = there_writer
        ways = [
            asyncio.create_task(pair.carry(reader, there_writer, self._delay)),
            asyncio.create_task(pair.carry(there_reader, writer, self._delay)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.scheme == "unix":
            return await asyncio.open_unix_connection(self._target.path)
        return await asyncio.open_connection(self._target.hostname, self._target.port)


class _Pair:
    """The two sockets of one connection through the proxy."""

    def __init__(self, here: asyncio.StreamWriter, *, muted: bool) -> None:
        self.muted = muted
        self.there: asyncio.StreamWriter | None = None
        self.task: asyncio.Task[Any] | None = None
        self._here = here

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay: Callable[[], float]) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                await asyncio.sleep(delay())
                if not self.muted:
                    sink.write(data)
                    await sink.drain()

    def cut(self) -> None:
        """Close both ends with a reset, so that the other side notices at once."""
        for writer in (self._here, self.there):
            if writer is not None and not writer.transport.is_closing():
                sock = writer.get_extra_info("socket")
                if sock is not None and sock.family != socket.AF_UNIX:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
                writer.transport.abort()

"""Messages between a worker and its Gym host: length-prefixed msgpack over a socket pair.

Arrays and tensors become lists, because Gym takes JSON.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

# Untyped as it comes.
_msgpack = cast(Any, msgpack)
_LENGTH = struct.Struct(">I")
Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """A message as bytes; raises `TypeError` or `ValueError` for what has no JSON form."""
    body = cast(bytes, _msgpack.packb(message, default=_plain, use_bin_type=True))
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    return cast(Message, _msgpack.unpackb(body, raw=False, strict_map_key=False))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form; give NeMo Gym plain values, lists, arrays or tensors")


def receive_blocking(connection: socket.socket) -> Message:
    """The next message, for plain code; raises `EOFError` when the other side is gone."""
    return decode(_exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError("the other side of the Gym connection is gone")
        data += chunk
    return bytes(data)


class Wire:
    """One side of the connection, inside an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Wire:
        return cls(*await asyncio.open_unix_connection(sock=connection))

    async def send(self, message: Message) -> None:
        """Raises `ConnectionError` when the other side is gone."""
        self._writer.write(encode(message))
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next message; None when the other side is gone."""
        try:
            size = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]
            return decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()

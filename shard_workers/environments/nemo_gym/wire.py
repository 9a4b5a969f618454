"""Messages between a worker and its Gym host: length-prefixed msgpack over a socket pair.

Arrays and tensors become lists, because Gym takes JSON.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from ....broker.codec_refusals import Refused, encode_error

# Untyped as it comes.
_msgpack = cast(Any, msgpack)
_LENGTH = struct.Struct(">I")
Message = dict[str, Any]


def encode(message: Message, *, where: str = "the message") -> bytes:
    """A message as bytes; raises `EncodeError` for what cannot travel, with `where`, the path inside it, and what
    stands there.
    """
    try:
        body = _pack(message)
        return _LENGTH.pack(len(body)) + body
    except Exception as error:
        raise encode_error(message, where, error, try_pack=_pack, opaque=()) from None


def decode(body: bytes) -> Message:
    return cast(Message, _msgpack.unpackb(body, raw=False, strict_map_key=False))


def _pack(value: Any) -> bytes:
    return cast(bytes, _msgpack.packb(value, default=_plain, use_bin_type=True))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, int):
        raise Refused(f"is an int of {value.bit_length()} bits, and 64 can travel; convert it to a str or a float")
    raise Refused(f"is of type {type(value).__name__}, which has no JSON form; use plain values, lists or arrays")


class Receiver:
    """Messages for plain code, byte by byte no more than each has. One that a time-out cuts is continued by the next
    call.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def receive(self) -> Message:
        """The next message; raises `EOFError` when the other side is gone."""
        self._fill(_LENGTH.size)
        self._fill(_LENGTH.size + _LENGTH.unpack_from(self._data)[0])
        body = bytes(self._data[_LENGTH.size :])
        self._data.clear()
        return decode(body)

    def _fill(self, size: int) -> None:
        while len(self._data) < size:
            chunk = self._connection.recv(size - len(self._data))
            if not chunk:
                raise EOFError("the other side of the Gym connection is gone")
            self._data += chunk


class Wire:
    """One side of the connection, inside an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Wire:
        return cls(*await asyncio.open_unix_connection(sock=connection))

    async def send(self, message: Message) -> None:
        """Raises `ConnectionError` when the other side is gone, and `EncodeError`."""
        await self.write(encode(message))

    async def write(self, encoded: bytes) -> None:
        """Send what `encode` made; raises `ConnectionError` when the other side is gone."""
        self._writer.write(encoded)
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

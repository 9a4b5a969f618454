"""A server for tests that says in the broker's protocol exactly what a test wants, and nothing more."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import hiredis

INFO = "redis_version:7.4.0\r\nrun_id:abc\r\nuptime_in_seconds:9"
Say = Callable[[list[bytes]], bytes | None]


def bulk(text: str) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text.encode()), text.encode())


def greeting(command: list[bytes], info: str = INFO) -> bytes | None:
    """What a server answers to a handshake; None to anything else."""
    match command[0].upper():
        case b"AUTH" | b"SELECT":
            return b"+OK\r\n"
        case b"CLIENT":
            return b":7\r\n" if command[1].upper() == b"ID" else b"+OK\r\n"
        case b"INFO":
            return bulk(info)
        case _:
            return None


class Hangup(Exception):
    """Raised by a `Say`: send these bytes and close."""

    def __init__(self, last_words: bytes = b"") -> None:
        super().__init__(last_words)
        self.last_words = last_words


@asynccontextmanager
async def speaking(say: Say, tls: ssl.SSLContext | None = None) -> AsyncGenerator[str]:
    """A loopback server that answers each command with what `say` gives (None: no answer); yields its address."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        parser = hiredis.Reader()
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    answer = say(command)
                    if answer is not None:
                        writer.write(answer)
        except Hangup as end:
            writer.write(end.last_words)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"{'rediss' if tls else 'redis'}://127.0.0.1:{port}/0"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()

"""A blocking connection over a unix socket, with the product's own protocol writer and reader."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from typing import Any

from rolloutbus.broker.channel import Arg, Buffer, pack
from rolloutbus.broker.replies import NOTHING, LargeReplies, SmallReplies

Command = Sequence[Arg]
# Streams with their entries, each an id with its fields and values, as a read answers.
Found = list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]
BUFFERS_PER_CALL = 32
SEND_BUFFER = 1 << 20


class Connection:
    """`large`: replies hold large strings, which come as views."""

    def __init__(self, url: str, *, large: bool = False) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(url.removeprefix("unix://"))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._replies = LargeReplies() if large else SmallReplies()

    def send(self, commands: Sequence[Command]) -> None:
        left: list[Buffer] = pack(commands)
        while left:
            sent = self._socket.sendmsg(list(itertools.islice(left, BUFFERS_PER_CALL)))
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = memoryview(left[0])[sent:]

    def receive(self, count: int) -> list[Any]:
        """So many replies."""
        found: list[Any] = []
        while len(found) < count:
            reply = self._replies.next()
            if reply is not NOTHING:
                found.append(reply)
                continue
            received = self._socket.recv_into(self._replies.space())
            if not received:
                raise ConnectionError("the server closed the connection")
            self._replies.received(received)
        return found

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        self.send(commands)
        return self.receive(len(commands))

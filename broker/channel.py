"""One pipelined connection to the broker, and a link that opens it again when it breaks.

A `Channel` writes commands in one go, without joining large payloads, and resolves replies in order; it never retries.
A `Link` owns one channel at a time and reconnects with jitter, for at most `reconnect_timeout_s`; every command has a
time limit. redis-py's pipeline copies large arguments, which halves the rate at 1 MB rows (measured), so the hot path
writes for itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import hiredis

from .errors import BrokerError, BrokerTimeoutError, BrokerUnavailableError, ClosedError
from .handshake import NOT_READY, Hello, greet, open_transport, translate
from .outage import Outage
from .replies import NOTHING, LargeReplies, ReplyError, SmallReplies
from .settings import BrokerSettings, redacted
from .sockets import HIGH_WATER, SocketTransport

log = logging.getLogger("rolloutbus.broker")

Buffer = bytes | memoryview
# Below this size one copy is cheaper than another buffer in the write.
JOIN_BELOW = 16_384
_AWAY_S = 1.0


class Payload(NamedTuple):
    """One binary argument in several buffers of bytes, written one after the other without being joined."""

    buffers: Sequence[Buffer]
    size: int

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Payload:
        return cls(buffers, sum(map(len, buffers)))

    def joined(self) -> bytes:
        return b"".join(self.buffers)


Arg = bytes | str | int | float | Payload
Command = Sequence[Arg]


_pack_small = cast("Callable[[tuple[Arg, ...]], bytes]", hiredis.pack_command)  # pyright: ignore[reportUnknownMemberType]


def pack(commands: Sequence[Command]) -> list[Buffer]:
    """Commands as the buffers to write, in the server's protocol (RESP). A payload may stand only in the last place."""
    out: list[Buffer] = []
    small: list[bytes] = []
    for command in commands:
        last = command[-1]
        if isinstance(last, Payload):
            _pack_with_payload(command, last, small, out)
        else:
            small.append(_pack_small(tuple(command)))
    if small:
        out.append(b"".join(small))
    return out


def _pack_with_payload(command: Command, payload: Payload, small: list[bytes], out: list[Buffer]) -> None:
    # All but the payload is packed in C; only the count in front is one too low.
    head = _pack_small(tuple(command[:-1]))
    small.append(b"*%d%b$%d\r\n" % (len(command), head[head.index(b"\r") :], payload.size))
    if payload.size < JOIN_BELOW:
        small.extend(payload.buffers)  # pyright: ignore[reportArgumentType]
    else:
        for buffer in payload.buffers:
            if len(buffer) < JOIN_BELOW:
                small.append(bytes(buffer))
                continue
            if small:
                out.append(b"".join(small))
                small.clear()
            out.append(buffer)
    small.append(b"\r\n")


@dataclass(slots=True)
class _Request:
    count: int
    future: asyncio.Future[list[Any]]
    deadline: float
    replies: list[Any] = field(default_factory=list[Any])


class Channel(asyncio.BufferedProtocol):
    """A connection after its handshake. `pipeline` may be called again before earlier replies are there."""

    def __init__(self, timeout_s: float) -> None:
        self.hello = Hello()
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._small = SmallReplies()
        self._replies: SmallReplies | LargeReplies = self._small
        self._pending: deque[_Request] = deque()
        self._outgoing: list[Buffer] = []
        self._transport: SocketTransport | asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._broken: Exception | None = None
        # When something came last.
        self._heard = 0.0
        self._gone = self._loop.create_future()

    @classmethod
    async def open(cls, settings: BrokerSettings, purpose: str, timeout_s: float | None = None) -> Channel:
        """Connect, authenticate and check the server; `purpose` shows in `CLIENT LIST`."""
        channel = cls(timeout_s or settings.command_timeout_s)
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                await open_transport(settings.url, channel)
                channel.hello = await greet(settings.url, channel, purpose)
        except BaseException as error:
            connected = channel._transport is not None
            await channel.close()
            if isinstance(error, BrokerError) or not isinstance(error, OSError):
                raise
            if connected and isinstance(error, TimeoutError):
                raise BrokerTimeoutError(
                    f"the broker at {redacted(settings.url)} accepted the connection and did not answer in time; "
                    "is it overloaded or stopped?"
                ) from None
            raise translate(error, settings.url) from None
        return channel

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def execute(self, *command: Arg) -> Any:
        """One command, its reply; an error reply is raised as one of our errors."""
        reply = (await self.pipeline([command]))[0]
        if isinstance(reply, ReplyError):
            raise translate(reply, "the broker")
        return reply

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Several commands in one write; error replies stand in the list as `ReplyError`."""
        if not commands:
            return []
        if not self._writable.is_set():
            await self._writable.wait()
        return await self.send(commands)

    def send(self, commands: Sequence[Command], *, large: bool = False) -> asyncio.Future[list[Any]]:
        """Write now, whatever the buffer holds; the future gives one reply per command.

        `large` says that a reply of large strings is awaited, and nothing else is: those come as `memoryview`.
        """
        if self._broken is not None or self._transport is None:
            raise self._broken or ClosedError("this connection to the broker is not open; connect first")
        # Packed at once, so that what cannot be sent is its sender's error and disturbs nobody else's replies.
        packed = pack(commands)
        # Only where no reply is out, so that none is half read.
        if not self._pending:
            self._replies = self._large if large else self._small
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._pending.append(_Request(len(commands), future, self._loop.time() + self._timeout_s))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._check_deadline)
        # Whatever is sent within one tick of the loop goes out in one write: a system call costs more than a group's
        # commands.
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.extend(packed)
        return future

    @functools.cached_property
    def _large(self) -> LargeReplies:
        return LargeReplies()

    def _flush(self) -> None:
        buffers, self._outgoing = self._outgoing, []
        if self._transport is not None and self._broken is None:
            self._transport.writelines(buffers)

    def abort(self) -> None:
        """Drop the connection at once; whoever waits for a reply gets `BrokerUnavailableError`."""
        self._fail(BrokerUnavailableError("the connection to the broker was closed; connect again"))

    async def close(self) -> None:
        """Close and wait until the socket is gone, so that no warning is left behind."""
        self.abort()
        if self._transport is not None:
            await self._gone

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        self._transport = transport

    def attach(self, transport: SocketTransport) -> None:
        """The way without TLS: `transport` writes buffers as they are."""
        self._transport = transport

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        return self._replies.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self._loop.time()
        try:
            self._replies.received(nbytes)
            while (reply := self._replies.next()) is not NOTHING:
                self._resolve(reply)
        except ReplyError as error:
            self._fail(
                BrokerUnavailableError(f"the broker sent what is no Redis protocol ({error}); check the address")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(BrokerUnavailableError(f"the broker closed the connection ({exc or 'end of stream'})"))
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _resolve(self, reply: Any) -> None:
        if not self._pending:
            return
        request = self._pending[0]
        request.replies.append(reply)
        if len(request.replies) == request.count:
            self._pending.popleft()
            if not request.future.done():
                request.future.set_result(request.replies)

    def _check_deadline(self) -> None:
        self._watch = None
        if not self._pending:
            return
        # A reply that is coming in takes as long as the network needs; silence is what is not waited for.
        left = max(self._pending[0].deadline, self._heard + self._timeout_s) - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check_deadline)
            return
        self._fail(
            BrokerTimeoutError(f"the broker did not answer within {self._timeout_s:g} s; is it overloaded or stopped?")
        )

    def _fail(self, error: Exception) -> None:
        if self._broken is None:
            self._broken = error
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._writable.set()
        while self._pending:
            request = self._pending.popleft()
            if not request.future.done():
                request.future.set_exception(self._broken)
        if self._transport is not None:
            self._transport.abort()


class Link:
    """A channel that is opened again when it breaks. Only for commands that may be sent twice.

    `on_connect` runs on each new channel before anybody uses it. `watching_since` (monotonic seconds) is when this
    process began to see the broker without interruption: absence of others counts only from then on.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        purpose: str,
        on_connect: Callable[[Channel], Awaitable[None]] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.settings = settings
        self.watching_since = float("inf")
        self._purpose = purpose
        self._on_connect = on_connect
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    @property
    def current(self) -> Channel | None:
        """The open channel, or None while there is none."""
        return self._channel if self._channel is not None and not self._channel.broken else None

    def watched_for(self, seconds: float) -> bool:
        """True when nobody's absence in the last `seconds` can be due to our own or the broker's."""
        return self.current is not None and time.monotonic() - self.watching_since >= seconds

    def patience_s(self, limit_s: float) -> float:
        """How long whoever leaves waits for the broker: hardly, where it is known to be away."""
        return limit_s if self.current is not None else min(_AWAY_S, limit_s)

    async def channel(self) -> Channel:
        """The open channel; connects when there is none, once, raising what went wrong."""
        if (open_now := self.current) is not None:
            return open_now
        async with self._opening:
            if (open_now := self.current) is not None:
                return open_now
            if self._closed:
                raise ClosedError(f"the connection for {self._purpose} is closed")
            first = self._channel is None
            channel = await Channel.open(self.settings, self._purpose, self._timeout_s)
            if self._on_connect is not None:
                try:
                    await self._on_connect(channel)
                except BaseException:
                    await channel.close()
                    raise
            if self._closed:
                await channel.close()
                raise ClosedError(f"the connection for {self._purpose} is closed")
            self.watching_since = time.monotonic() - (channel.hello.uptime_s if first else 0.0)
            self._channel = channel
            return channel

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send `commands` until they are answered, over reconnects; gives up after `reconnect_timeout_s`."""
        return await self.retrying(lambda channel: _when_ready(channel, commands))

    async def retrying(self, use: Callable[[Channel], Awaitable[list[Any]]]) -> list[Any]:
        """Call `use` with an open channel until it gets an answer; connection errors reconnect with jitter."""
        started = time.monotonic()
        outage: Outage | None = None
        while True:
            try:
                return await use(await self.channel())
            except (BrokerUnavailableError, BrokerTimeoutError) as error:
                waited = time.monotonic() - started
                if self._closed or waited > self.settings.reconnect_timeout_s:
                    raise BrokerUnavailableError(
                        f"{self._purpose}: no answer from {redacted(self.settings.url)} for {waited:.0f} s ({error}); "
                        "check that the broker runs and is reachable from here"
                    ) from None
                # Made only now: nearly every call succeeds at once.
                outage = outage or Outage(log, self._purpose, started)
                await outage.pause(error)

    def reset(self) -> None:
        """Drop the open channel; the next use connects again."""
        if self._channel is not None:
            self._channel.abort()

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


async def _when_ready(channel: Channel, commands: Sequence[Command]) -> list[Any]:
    replies = await channel.pipeline(commands)
    for reply in replies:
        if isinstance(reply, ReplyError) and str(reply).startswith(NOT_READY):
            # Busy, or a replica since a failover: a new connection is greeted only by a server that can work.
            channel.abort()
            raise translate(reply, "the broker")
    return replies


def raise_first_error(replies: Sequence[Any]) -> None:
    """Raise the first error among `replies` as one of our errors."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise translate(reply, "the broker")
        if isinstance(reply, BrokerError):
            raise reply

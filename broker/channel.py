"""One pipelined connection to the broker, and a link that opens it again when it breaks.

A `Channel` writes commands in one go, without joining large payloads, and resolves replies in order; it never retries. A `Link`
owns one channel at a time and reconnects with jitter, for at most `reconnect_timeout_s`; every command has a time limit.
redis-py's pipeline copies large arguments, which halves the rate at 1 MB rows (measured), so the hot path writes for itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import hiredis
from redis.backoff import ExponentialWithJitterBackoff

from .errors import BrokerError, BrokerTimeoutError, BrokerUnavailableError, ClosedError
from .handshake import Hello, greet, open_transport, translate
from .settings import BrokerSettings, redacted

log = logging.getLogger("rolloutbus.broker")

Buffer = bytes | memoryview
# Below this size one copy is cheaper than another buffer in the write.
JOIN_BELOW = 16_384
_NOTHING = object()


class ReplyError(Exception):
    """An error reply, as it stands in a list of replies; never raised out of this package as it is."""


@dataclass(frozen=True, slots=True)
class Payload:
    """One binary argument in several buffers, written one after the other without being joined."""

    buffers: Sequence[Buffer]
    size: int

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Payload:
        return cls(buffers, sum(memoryview(buffer).nbytes for buffer in buffers))


Arg = bytes | str | int | float | Payload
Command = Sequence[Arg]


_pack_small = cast("Callable[[tuple[Arg, ...]], bytes]", hiredis.pack_command)  # pyright: ignore[reportUnknownMemberType]


def pack(commands: Sequence[Command]) -> list[Buffer]:
    """Commands as the buffers to write, in the server's protocol (RESP)."""
    out: list[Buffer] = []
    small: list[bytes] = []
    for command in commands:
        if not any(isinstance(arg, Payload) for arg in command):
            small.append(_pack_small(tuple(command)))
            continue
        small.append(b"*%d\r\n" % len(command))
        for arg in command:
            _pack_argument(arg, small, out)
    if small:
        out.append(b"".join(small))
    return out


def _pack_argument(arg: Arg, small: list[bytes], out: list[Buffer]) -> None:
    if not isinstance(arg, Payload):
        raw = arg if isinstance(arg, bytes) else str(arg).encode()
        small.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
        return
    small.append(b"$%d\r\n" % arg.size)
    if arg.size < JOIN_BELOW:
        small.extend(bytes(buffer) for buffer in arg.buffers)
    else:
        for buffer in arg.buffers:
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


class Channel(asyncio.Protocol):
    """A connection after its handshake. `pipeline` may be called again before earlier replies are there."""

    def __init__(self, timeout_s: float) -> None:
        self.hello = Hello()
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(protocolError=ReplyError, replyError=ReplyError, notEnoughData=_NOTHING)
        self._pending: deque[_Request] = deque()
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._broken: Exception | None = None
        self._gone = self._loop.create_future()

    @classmethod
    async def open(cls, settings: BrokerSettings, purpose: str, timeout_s: float | None = None) -> Channel:
        """Connect, authenticate and check the server; `purpose` shows in `CLIENT LIST`."""
        channel = cls(timeout_s or settings.command_timeout_s)
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                await open_transport(settings.url, channel)
                channel.hello = await greet(settings.url, channel, purpose)
        except (OSError, TimeoutError, ReplyError) as error:
            channel.abort()
            raise translate(error, settings.url) from None
        except BaseException:
            channel.abort()
            raise
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

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Write now, whatever the buffer holds; the future gives one reply per command."""
        if self._broken is not None or self._transport is None:
            raise self._broken or ClosedError("this connection to the broker is not open; connect first")
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._pending.append(_Request(len(commands), future, self._loop.time() + self._timeout_s))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._check_deadline)
        self._transport.writelines(pack(commands))
        return future

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
        transport.set_write_buffer_limits(high=4 << 20)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NOTHING:
                self._resolve(reply)
        except ReplyError as error:
            self._fail(
                BrokerUnavailableError(
                    f"the broker sent what is no Redis protocol ({error}); check the address"
                )
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
        left = self._pending[0].deadline - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check_deadline)
            return
        self._fail(
            BrokerTimeoutError(
                f"the broker did not answer within {self._timeout_s:g} s; is it overloaded or stopped?"
            )
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

    `on_connect` runs on each new channel before anybody uses it. `watching_since` (monotonic seconds) is when this process began
    to see the broker without interruption: absence of others counts only from then on.
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
                    channel.abort()
                    raise
            self.watching_since = time.monotonic() - (channel.hello.uptime_s if first else 0.0)
            self._channel = channel
            return channel

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send `commands` until they are answered, over reconnects; gives up after `reconnect_timeout_s`."""
        return await self.retrying(lambda channel: channel.pipeline(commands))

    async def retrying(self, use: Callable[[Channel], Awaitable[list[Any]]]) -> list[Any]:
        """Call `use` with an open channel until it gets an answer; connection errors reconnect with jitter."""
        backoff = ExponentialWithJitterBackoff(cap=1.0, base=0.02)
        started, failures = time.monotonic(), 0
        while True:
            try:
                return await use(await self.channel())
            except (BrokerUnavailableError, BrokerTimeoutError) as error:
                failures += 1
                waited = time.monotonic() - started
                if self._closed or waited > self.settings.reconnect_timeout_s:
                    raise BrokerUnavailableError(
                        f"{self._purpose}: no answer from {redacted(self.settings.url)} for {waited:.0f} s ({error}); "
                        "check that the broker runs and is reachable from here"
                    ) from None
                if failures in (1, 10) or failures % 60 == 0:
                    log.warning("%s: waiting for the broker since %.1f s (%s)", self._purpose, waited, error)
                await asyncio.sleep(backoff.compute(min(failures, 12)))

    def reset(self) -> None:
        """Drop the open channel; the next use connects again."""
        if self._channel is not None:
            self._channel.abort()

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


def raise_first_error(replies: Sequence[Any]) -> None:
    """Raise the first error among `replies` as one of our errors."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise translate(reply, "the broker")
        if isinstance(reply, BrokerError):
            raise reply

"""One pipelined connection: replies in order, every wait bounded, large payloads as they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from rolloutbus.broker.channel import Buffer, Channel, Link, Payload, ReplyError, pack
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerTimeoutError,
    BrokerUnavailableError,
    ClosedError,
)
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.sockets import SocketTransport, connect_socket

from tests.broker.speaking import Hangup, greeting, speaking


def settings(url: str, **values: Any) -> BrokerSettings:
    return BrokerSettings(url=url, **values)


@pytest.fixture(params=["valkey", "redis_7"])
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[Channel]:
    broker: EmbeddedBroker = request.getfixturevalue(request.param)
    channel = await Channel.open(settings(broker.url), "test")
    yield channel
    await channel.close()


def view_of(array: Any) -> memoryview:
    return memoryview(array).cast("B")


async def until_pending(channel: Channel, count: int) -> None:
    while len(channel._pending) < count:  # noqa: ASYNC110  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)


async def test_replies_come_in_order_under_concurrent_pipelines(channel: Channel):
    async def ask(at: int) -> list[Any]:
        return await channel.pipeline([("ECHO", f"{at}-{part}") for part in range(at % 5 + 1)])

    for at, replies in enumerate(await asyncio.gather(*(ask(at) for at in range(200)))):
        assert replies == [f"{at}-{part}".encode() for part in range(at % 5 + 1)]


async def test_an_error_reply_stands_in_its_place_and_disturbs_no_other(channel: Channel):
    replies = await channel.pipeline([("ECHO", "a"), ("NO-SUCH-COMMAND",), ("ECHO", "b")])
    assert [replies[0], replies[2]] == [b"a", b"b"]
    assert isinstance(replies[1], ReplyError)
    with pytest.raises(BrokerError, match=r"the broker refused: .*NO-SUCH-COMMAND"):
        await channel.execute("NO-SUCH-COMMAND")


async def test_an_empty_pipeline_needs_no_server(channel: Channel):
    assert await channel.pipeline([]) == []


async def test_a_large_payload_of_several_buffers_arrives_whole(channel: Channel):
    arrays = [np.arange(size, dtype=np.float32) for size in (10, 70_000, 3, 200_000)]
    payload = Payload.of([b"head", *map(view_of, arrays), b"tail"])
    expected = b"head" + b"".join(array.tobytes() for array in arrays) + b"tail"
    assert payload.size == len(expected)
    echoes = await asyncio.gather(*(channel.execute("ECHO", payload) for _ in range(8)))
    assert all(echo == expected for echo in echoes)


async def test_more_than_the_kernel_buffers_goes_out_and_comes_back(channel: Channel):
    large = [Payload.of([bytes([at]) * (3 << 20)]) for at in range(4)]
    echoes = await asyncio.gather(*(channel.execute("ECHO", payload) for payload in large))
    assert [(echo[0], len(set(echo)), len(echo)) for echo in echoes] == [(at, 1, 3 << 20) for at in range(4)]


def test_large_buffers_are_handed_to_the_transport_as_they_are():
    array = np.zeros(1 << 20, dtype=np.float32)
    view = view_of(array)
    packed = pack([("XADD", "s", "*", "payload", Payload.of([b"head", view, b"tail"])), ("PING",)])
    assert [item for item in packed if item is view] == [view]
    assert b"".join(packed).endswith(b"tail\r\n*1\r\n$4\r\nPING\r\n")
    assert len(packed) == 3


async def test_what_is_sent_within_one_tick_is_one_write_and_large_buffers_are_not_copied():
    class Recorder:
        def __init__(self) -> None:
            self.writes: list[list[Any]] = []

        def writelines(self, buffers: Sequence[Any]) -> None:
            self.writes.append(list(buffers))

        def abort(self) -> None: ...

    recorder, channel = Recorder(), Channel(5.0)
    channel.attach(recorder)  # pyright: ignore[reportArgumentType]
    views = [view_of(np.zeros(1 << 18, dtype=np.float32)) for _ in range(3)]
    replies = [channel.send([("XADD", "s", "*", "payload", Payload.of([b"head", view]))]) for view in views]
    await asyncio.sleep(0)
    (written,) = recorder.writes
    assert [item for item in written if isinstance(item, memoryview)] == views
    assert all(any(item is view for item in written) for view in views)
    wire = b"$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n"
    channel.get_buffer()[: len(wire)] = wire
    channel.buffer_updated(len(wire))
    assert [await reply for reply in replies] == [[b"a"], [b"b"], [b"c"]]
    channel.abort()


def test_small_buffers_are_joined_into_one_write():
    packed = pack([("ECHO", Payload.of([b"a" * 100, memoryview(b"b" * 100)])), ("PING",)])
    assert packed == [b"*2\r\n$4\r\nECHO\r\n$200\r\n" + b"a" * 100 + b"b" * 100 + b"\r\n*1\r\n$4\r\nPING\r\n"]


@pytest.mark.parametrize("bad", [None, object(), ["list"]])
async def test_what_cannot_be_sent_is_its_senders_error_and_nobody_elses(channel: Channel, bad: Any):
    before, after = channel.execute("ECHO", "before"), channel.execute("ECHO", "after")
    first = asyncio.ensure_future(before)
    with pytest.raises(TypeError):
        await channel.execute("ECHO", bad)
    assert [await first, await after] == [b"before", b"after"]


async def test_text_that_is_no_unicode_is_its_senders_error(channel: Channel):
    with pytest.raises(UnicodeEncodeError):
        await channel.execute("ECHO", "\udc80")
    assert await channel.execute("ECHO", "fine") == b"fine"


async def test_a_cancelled_awaiter_does_not_disturb_the_order_of_later_replies():
    replies: list[bytes] = []

    def say(command: list[bytes]) -> bytes | None:
        if (answer := greeting(command)) is not None:
            return answer
        replies.append(b"$1\r\n%b\r\n" % command[1])
        return b"".join(replies) if len(replies) == 3 else None

    async with speaking(say) as url:
        channel = await Channel.open(settings(url), "test")
        first, second = [asyncio.create_task(channel.execute("ECHO", word)) for word in ("a", "b")]
        await until_pending(channel, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await channel.execute("ECHO", "c") == b"c"
        assert await second == b"b"
        await channel.close()


# Time limits


@contextlib.asynccontextmanager
async def silent() -> AsyncGenerator[str]:
    """Accepts connections, greets, and answers nothing else."""
    async with speaking(greeting) as url:
        yield url


async def test_every_face_of_a_channel_gives_up_in_time():
    async with silent() as url:
        faces: list[Callable[[Channel], Awaitable[Any]]] = [
            lambda channel: channel.execute("PING"),
            lambda channel: channel.pipeline([("PING",), ("PING",)]),
            lambda channel: channel.send([("PING",)]),
        ]
        for use in faces:
            # The greeting has to come within it too, also on a machine that does much else.
            channel = await Channel.open(settings(url), "test", timeout_s=0.5)
            began = asyncio.get_running_loop().time()
            with pytest.raises(BrokerTimeoutError, match=r"did not answer within 0\.5 s"):
                await use(channel)
            assert 0.4 < asyncio.get_running_loop().time() - began < 5
            assert channel.broken
            with pytest.raises(BrokerTimeoutError):
                await channel.execute("PING")
            await channel.close()


async def test_a_server_that_never_greets_is_a_timeout():
    async with speaking(lambda command: None) as url:
        with pytest.raises(BrokerTimeoutError, match=r"127\.0\.0\.1.*did not answer in time"):
            await Channel.open(settings(url, connect_timeout_s=0.5), "test")
        with pytest.raises(BrokerTimeoutError):
            await Channel.open(settings(url, command_timeout_s=0.05), "test")
        link = Link(settings(url, connect_timeout_s=0.5), "test")
        with pytest.raises(BrokerTimeoutError):
            await link.channel()
        await link.close()


async def test_a_link_gives_up_after_its_time_and_names_the_address():
    async with silent() as url:
        link = Link(settings(url, reconnect_timeout_s=0.2), "the test", timeout_s=0.05)
        with pytest.raises(
            BrokerUnavailableError, match=r"the test: no answer from redis://127\.0\.0\.1:\d+/0 for .*did not answer"
        ):
            await link.run([("PING",)])
        await link.close()


# Breaking connections


async def test_a_server_that_hangs_up_in_the_middle_of_a_reply():
    def say(command: list[bytes]) -> bytes | None:
        if (answer := greeting(command)) is not None:
            return answer
        raise Hangup(b"$100\r\nonly a part")

    async with speaking(say) as url:
        channel = await Channel.open(settings(url), "test")
        asked = [asyncio.create_task(channel.execute("ECHO", "a")) for _ in range(3)]
        for task in asked:
            with pytest.raises(BrokerUnavailableError, match="closed the connection"):
                await task
        with pytest.raises(BrokerUnavailableError):
            await channel.execute("PING")
        await channel.close()


async def test_garbage_instead_of_a_reply_breaks_the_connection_with_a_hint():
    def say(command: list[bytes]) -> bytes | None:
        return greeting(command) or b"HTTP/1.1 400 Bad Request\r\n\r\n"

    async with speaking(say) as url:
        channel = await Channel.open(settings(url), "test")
        with pytest.raises(BrokerUnavailableError, match="no Redis protocol"):
            await channel.execute("PING")
        await channel.close()
    async with speaking(lambda command: b"SSH-2.0-OpenSSH\r\n") as url:
        with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1.*no Redis protocol"):
            await Channel.open(settings(url), "test")


async def test_words_that_nobody_asked_for_are_ignored():
    def say(command: list[bytes]) -> bytes | None:
        return greeting(command) or b"+PONG\r\n+unasked\r\n"

    async with speaking(say) as url:
        channel = await Channel.open(settings(url), "test")
        assert await channel.execute("PING") == b"PONG"
        assert not channel.broken
        await channel.close()


async def test_whoever_waits_learns_that_the_channel_was_closed():
    async with silent() as url:
        channel = await Channel.open(settings(url), "test")
        asked = asyncio.create_task(channel.execute("PING"))
        await until_pending(channel, 1)
        await channel.close()
        with pytest.raises(BrokerUnavailableError, match="was closed"):
            await asked
        await channel.close()


async def test_a_channel_that_was_never_opened_says_so():
    with pytest.raises(ClosedError, match="connect first"):
        await Channel(1.0).execute("PING")


async def test_waiting_for_room_to_write_ends_when_the_connection_does():
    async with silent() as url:
        channel = await Channel.open(settings(url), "test")
        channel.pause_writing()
        asked = asyncio.create_task(channel.execute("PING"))
        await asyncio.sleep(0)
        channel.abort()
        with pytest.raises(BrokerUnavailableError):
            await asked
        await channel.close()


# Links


async def test_a_link_reconnects_to_a_restarted_server_and_watches_anew():
    loop = asyncio.get_running_loop()
    with EmbeddedBroker() as broker:
        connections: list[str] = []

        async def on_connect(channel: Channel) -> None:
            connections.append(channel.hello.run_id)
            await load_scripts(channel)

        link = Link(settings(broker.url), "test", on_connect)
        assert not link.watched_for(0)
        first = await link.channel()
        assert link.watching_since == pytest.approx(loop.time() - first.hello.uptime_s, abs=0.5)
        await asyncio.to_thread(broker.kill)
        asked = asyncio.create_task(link.run([("PING",)]))
        while not first.broken:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not link.watched_for(0)
        await asyncio.to_thread(broker.restart)
        assert await asked == [b"PONG"]
        assert len(set(connections)) == 2
        assert link.watched_for(0)
        assert loop.time() - link.watching_since < 5
        await link.close()
        with pytest.raises(ClosedError, match="test is closed"):
            await link.channel()


async def test_on_a_first_connection_the_servers_uptime_counts_as_watched():
    aged = "redis_version:7.4.0\r\nrun_id:abc\r\nuptime_in_seconds:500"
    async with speaking(lambda command: greeting(command, aged) or b"+PONG\r\n") as url:
        link = Link(settings(url), "test")
        await link.channel()
        assert link.watched_for(499)
        assert not link.watched_for(510)
        link.reset()
        assert not link.watched_for(0)
        await link.channel()
        assert not link.watched_for(499)
        await link.close()


async def test_many_users_of_a_link_share_one_connection(valkey: EmbeddedBroker):
    opened: list[int] = []

    async def on_connect(channel: Channel) -> None:
        opened.append(channel.hello.client_id)

    link = Link(settings(valkey.url), "test", on_connect)
    channels = await asyncio.gather(*(link.channel() for _ in range(20)))
    assert len({id(channel) for channel in channels}) == len(opened) == 1
    await link.close()


async def test_a_link_that_is_closed_while_it_connects_leaves_no_connection(valkey: EmbeddedBroker):
    async def on_connect(channel: Channel) -> None:
        await link.close()

    link = Link(settings(valkey.url), "closed-while-connecting", on_connect)
    with pytest.raises(ClosedError):
        await link.channel()
    other = Link(settings(valkey.url), "test")
    (clients,) = await other.run([("CLIENT", "LIST")])
    assert b"closed-while-connecting" not in clients
    await other.close()


async def test_a_connection_whose_set_up_fails_is_not_kept(valkey: EmbeddedBroker):
    async def on_connect(channel: Channel) -> None:
        raise BrokerAuthError("not here")

    link = Link(settings(valkey.url), "test", on_connect)
    with pytest.raises(BrokerAuthError, match="not here"):
        await link.run([("PING",)])
    assert link.current is None
    await link.close()


@pytest.mark.parametrize("word", ["LOADING the dataset", "READONLY a replica", "BUSY a script", "MASTERDOWN link"])
async def test_a_server_that_is_not_ready_is_asked_again(word: str):
    refusals = [f"-{word}\r\n".encode()] * 2

    def say(command: Sequence[bytes]) -> bytes | None:
        return greeting(list(command)) or (refusals.pop() if refusals else b"+PONG\r\n")

    async with speaking(say) as url:
        link = Link(settings(url), "test")
        assert await link.run([("PING",)]) == [b"PONG"]
        assert not refusals
        await link.close()


def test_a_payload_tells_its_size_and_joins():
    buffers: list[Buffer] = [b"ab", memoryview(b"cd")]
    assert (Payload.of(buffers).size, Payload.of(buffers).joined()) == (4, b"abcd")
    assert Payload.of([]).size == 0


async def test_a_reply_that_comes_in_pieces_may_take_longer_than_the_time_limit():
    """Over a slow network a large reply was cut off each time, and asked for again, for ever."""
    body = bytes(40)
    pieces = [b"$40\r\n", *[body[at : at + 1] for at in range(40)], b"\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.02)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = Channel(0.4)
    channel.attach(SocketTransport(await connect_socket("127.0.0.1", port, None), channel))
    started = asyncio.get_running_loop().time()
    assert await channel.send([("GET", "k")]) == [body]
    assert asyncio.get_running_loop().time() - started > 0.4
    with pytest.raises(BrokerTimeoutError):
        await channel.send([("GET", "k")])
    await channel.close()
    server.close()

"""The one reader of a client: where it goes on reading, whatever happens while a read is out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rolloutbus.broker.channel import Channel, Command
from rolloutbus.broker.errors import BatchCancelledError, BrokerUnavailableError
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.collector import BatchCollection, Collector, Sink
from rolloutbus.collector.collection import Handover

from tests.entries import rows_payload

LIMIT_S = 10
KEYS = Keys("run")


class Broker:
    """Plays the connection: a read stays out until the test answers it."""

    def __init__(self) -> None:
        self.broken = False
        self.hello = SimpleNamespace(run_id="one", client_id=1)
        self.there = {"b", "first", "resumed"}
        self.reads: asyncio.Queue[tuple[Command, asyncio.Future[list[Any]]]] = asyncio.Queue()

    def send(self, commands: Sequence[Command], *, large: bool = False) -> asyncio.Future[list[Any]]:
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.reads.put_nowait((commands[0], reply))
        return reply

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """The other connection: which batches exist. Nobody is unblocked."""
        return [int(str(command[1]).removeprefix(KEYS.batch("")) in self.there) for command in commands]

    async def close(self) -> None:
        self.broken = True

    async def read(self) -> tuple[str, asyncio.Future[list[Any]]]:
        """Where the next read begins, and its reply to be."""
        command, reply = await asyncio.wait_for(self.reads.get(), LIMIT_S)
        return str(command[-1]), reply


def found(entry: str, batch: str, group: int) -> list[Any]:
    """A reply with one entry."""
    fields = {
        "kind": "rows", "batch": batch, "group": str(group), "row_indices": str(group), "attempt": "1", "instance": "s",
    }  # fmt: skip
    flat = [word.encode() for pair in fields.items() for word in pair]
    payload = rows_payload([{"reward": 1.0}]).joined()
    return [[[KEYS.results("me", "s").encode(), [[entry.encode(), [*flat, b"payload", payload]]]]]]


def batch(name: str, outcomes: list[Any]) -> BatchCollection:
    return BatchCollection(name, [{}, {}], 1, ["s", "s"], Sink(outcomes.append, outcomes.append))


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()

    async def open_channel(*_: object) -> Broker:
        return broker

    monkeypatch.setattr(Channel, "open", open_channel)
    return broker


class Transitions:
    """Plays the client's steps: what was handed over is written down."""

    client = "me"

    def __init__(self) -> None:
        self.handed_over: list[tuple[Any, ...]] = []
        self.go_on = asyncio.Event()

    async def handed(self, *what: Any) -> str:
        self.handed_over.append(what)
        await self.go_on.wait()
        return "ok"


@pytest.fixture
def transitions() -> Transitions:
    return Transitions()


@pytest.fixture
async def collector(broker: Broker, transitions: Transitions) -> AsyncGenerator[Collector]:
    collector = Collector(BrokerSettings(url="unix:///none"), KEYS, broker, transitions)  # pyright: ignore[reportArgumentType]
    running = asyncio.create_task(collector.run())
    yield collector
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_read_goes_on_after_what_was_read(broker: Broker, collector: Collector) -> None:
    outcomes: list[Any] = []
    await collector.attach(batch("b", outcomes), ["s"])
    begins, reply = await broker.read()
    reply.set_result(found("5-0", "b", 0))
    assert begins == "0-0"
    begins, _ = await broker.read()
    assert (begins, [outcome.group_index for outcome in outcomes]) == ("5-0", [0])


async def test_what_a_read_finds_does_not_undo_that_all_is_to_be_read_again(
    broker: Broker, collector: Collector
) -> None:
    """A batch was resumed while a read was out. That read found something, its stream was read on from there, and what
    the resumed batch already had on the stream was never seen.
    """
    await collector.attach(batch("first", []), ["s"])
    _, reply = await broker.read()
    reply.set_result(found("5-0", "first", 0))
    begins, out = await broker.read()
    assert begins == "5-0"
    resuming = asyncio.create_task(collector.attach(batch("resumed", outcomes := []), ["s"], from_start=True))
    await asyncio.sleep(0)
    out.set_result(found("7-0", "first", 1))
    begins, reply = await broker.read()
    assert begins == "0-0"
    reply.set_result(found("3-0", "resumed", 1))
    await asyncio.wait_for(resuming, LIMIT_S)
    await broker.read()
    assert [outcome.group_index for outcome in outcomes] == [1]


async def test_a_stream_is_taken_in_up_to_the_begin_of_a_read_that_left_nothing(
    broker: Broker, collector: Collector
) -> None:
    await collector.attach(batch("b", []), ["s"])
    assert collector.taken_in("s") == float("-inf")
    _, reply = await broker.read()
    out_since = time.monotonic()
    reply.set_result([None])
    await broker.read()
    assert collector.taken_in("s") <= out_since < time.monotonic()
    assert collector.taken_in("s") > float("-inf")


async def test_after_a_lost_connection_less_is_asked_for_at_once(broker: Broker, collector: Collector) -> None:
    """A server that sends less at once than was asked for ended each connection, and got the same question again."""
    await collector.attach(batch("b", []), ["s"])
    counts: list[int] = []
    for _ in range(4):
        command, reply = await asyncio.wait_for(broker.reads.get(), LIMIT_S)
        counts.append(int(str(command[2])))
        reply.set_exception(BrokerUnavailableError("the broker closed the connection"))
    assert counts == [16, 8, 4, 2]


async def test_an_entry_that_is_to_go_twice_frees_its_bytes_once(
    broker: Broker, collector: Collector, transitions: Transitions
) -> None:
    """Both its hand-over and its coming again waited to be passed on; what was unread then counted too low."""
    await collector.attach(batch("b", []), ["s"])
    for entry, group in ("4-0", 1), ("5-0", 0):
        _, reply = await broker.read()
        reply.set_result(found(entry, "b", group))
        _, reply = await broker.read()
        reply.set_result([None])
        collector.hand_over("b", [group])
        await asyncio.sleep(0)
    _, reply = await broker.read()
    reply.set_result(found("5-0", "b", 0))
    await broker.read()
    transitions.go_on.set()
    await asyncio.wait_for(collector.handed_over(), LIMIT_S)
    assert [(groups, list(entries)) for _, _, groups, entries in transitions.handed_over] == [
        ([1], ["4-0"]),
        ([0], ["5-0"]),
    ]


async def test_more_entries_than_a_script_may_name_go_in_parts(
    broker: Broker, collector: Collector, transitions: Transitions
) -> None:
    """A group of 9,000 rows that came one by one could never be acknowledged."""
    transitions.go_on.set()
    entries = {f"{at}-0": 1 for at in range(2500)}
    collector._let_go([Handover("b", "s", [7], entries)])  # pyright: ignore[reportPrivateUsage]
    await asyncio.wait_for(collector.handed_over(), LIMIT_S)
    parts = [(groups, len(some)) for _, _, groups, some in transitions.handed_over]
    assert parts == [([], 1000), ([], 1000), ([7], 500)]
    assert [entry for *_, some in transitions.handed_over for entry in some] == list(entries)


async def test_what_another_batch_left_goes_once_that_batch_is_gone(
    broker: Broker, collector: Collector, transitions: Transitions
) -> None:
    """It was looked at once, while its batch could still be resumed, and stayed as long as this client."""
    transitions.go_on.set()
    await collector.attach(batch("b", []), ["s"])
    _, reply = await broker.read()
    reply.set_result(found("5-0", "first", 0))
    _, reply = await broker.read()
    assert transitions.handed_over == []
    broker.there.discard("first")
    collector._strangers_due = 0.0  # pyright: ignore[reportPrivateUsage]
    reply.set_result([None])
    await broker.read()
    await asyncio.wait_for(collector.handed_over(), LIMIT_S)
    assert [(*what[:3], list(what[3])) for what in transitions.handed_over] == [("-", "s", [], ["5-0"])]


async def test_the_word_of_an_operators_cancel_is_deleted_when_it_was_read(
    broker: Broker, collector: Collector, transitions: Transitions
) -> None:
    transitions.go_on.set()
    outcomes: list[Any] = []
    await collector.attach(batch("b", outcomes), ["s"])
    _, reply = await broker.read()
    words = [b"kind", b"cancelled", b"batch", b"b", b"reason", b"why"]
    reply.set_result([[[KEYS.results("me", "s").encode(), [[b"5-0", words]]]]])
    await broker.read()
    await asyncio.wait_for(collector.handed_over(), LIMIT_S)
    assert [type(outcome) for outcome in outcomes] == [BatchCancelledError]
    assert [list(what[3]) for what in transitions.handed_over] == [["5-0"]]

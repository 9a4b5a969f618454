"""Publishing against a broker of our own making: what is written, what waits for what, and what is told when it cannot
go on.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker import codec
from rolloutbus.broker.channel import Command
from rolloutbus.broker.client_transitions import BatchSpec, OutgoingGroup, Published
from rolloutbus.broker.errors import BatchError, BrokerFullError, EncodeError, PayloadTooLargeError, RolloutBusError
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.messages import ReplayOrigin
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.producer import CHECKSUM_LENGTH, Producer, PromptGroup, Publication, checksum, encode_group

from tests.stacks import until

KEYS = Keys("r")


def group(index: int, *, shard: str = "s", size: int = 2, **more: Any) -> PromptGroup:
    first = index * size
    rows: list[dict[str, Any]] = [{"responses_create_params": {}, "_rowidx": first + at, **more} for at in range(size)]
    return PromptGroup(index, first, "a", shard, rows)


def decoded(outgoing: OutgoingGroup) -> list[dict[str, Any]]:
    return codec.decode_rows(b"".join(outgoing.payload.buffers))


class Broker:
    """Plays both of what a producer talks to: the transitions, and the connection for memory and queues."""

    def __init__(self) -> None:
        self.opened: list[BatchSpec] = []
        self.writes: list[list[int]] = []
        self.origins: dict[int, ReplayOrigin | None] = {}
        self.queued = 0
        self.checksums = ""
        self.memory = "maxmemory:0\r\nused_memory:5"
        self.refusals: list[dict[int, RolloutBusError | Published]] = []
        self.restored: dict[int, str] = {}
        # The batch, how many writes there had been, and what was restored.
        self.sealed: list[tuple[str, int, dict[int, str]]] = []
        self.asked_for_room = asyncio.Event()

    async def open(self, spec: BatchSpec) -> str:
        self.opened.append(spec)
        return "ok" if len(self.opened) == 1 else "repeated"

    async def publish(self, groups: Sequence[OutgoingGroup]) -> list[Published | RolloutBusError]:
        self.writes.append([one.group for one in groups])
        self.origins |= {one.group: one.origin for one in groups}
        refused = self.refusals.pop(0) if self.refusals else {}
        answers: list[Published | RolloutBusError] = []
        for one in groups:
            if one.group in refused:
                answers.append(refused[one.group])
                continue
            self.queued += one.payload.size
            answers.append(Published("ok", f"1-{one.group}", self.queued))
        return answers

    async def restore(self, batch: str, group_size: int, ended: Mapping[int, str]) -> None:
        self.restored.update(ended)

    async def seal(self, batch: str, checksums: str = "") -> str:
        self.checksums = checksums
        self.sealed.append((batch, len(self.writes), dict(self.restored)))
        return "ok"

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        if commands[0][0] == "INFO":
            return [self.memory.encode()]
        self.asked_for_room.set()
        return [str(self.queued).encode()]

    def producer(self, **settings: Any) -> Producer:
        return Producer(self, KEYS, BrokerSettings(**settings), self)  # pyright: ignore[reportArgumentType]


def publication(*groups: PromptGroup) -> Publication:
    return Publication("b", groups, 2)


async def test_all_groups_are_written_once_and_the_batch_is_sealed() -> None:
    broker = Broker()
    out = publication(*(group(index) for index in range(100)))
    await broker.producer().publish(out)
    assert [index for write in broker.writes for index in write] == list(range(100))
    assert (out.published, len(broker.sealed)) == (100, 1)
    assert out.entries == {index: f"1-{index}" for index in range(100)}


async def test_the_first_group_does_not_wait_for_the_last_to_be_encoded() -> None:
    broker = Broker()
    await broker.producer().publish(publication(*(group(index) for index in range(50))))
    assert len(broker.writes[0]) < 5


async def test_the_batch_says_how_it_is_laid_out() -> None:
    broker = Broker()
    await broker.producer().publish(publication(group(0, shard="x"), group(1, shard="y"), group(2, shard="y")))
    spec = broker.opened[0]
    assert (spec.groups, spec.rows, spec.group_size, spec.shards) == (3, 6, 2, ("x", "y"))
    assert spec.layout == '[["x","a",1],["y","a",2]]'


async def test_publishing_waits_while_the_queue_is_over_its_bound_and_says_so() -> None:
    broker = Broker()
    out = publication(*(group(index, text="x" * 1000) for index in range(20)))
    work = asyncio.create_task(broker.producer(max_queued_bytes=3000).publish(out))
    while not work.done():
        await broker.asked_for_room.wait()
        broker.asked_for_room.clear()
        # What was there when the write began, and one write of at most the bound and a group.
        assert 3000 < broker.queued <= 2 * 3000 + 1200
        assert "shard s has 3000 bytes queued" in out.waiting_for
        broker.queued = 0
        asked = asyncio.create_task(broker.asked_for_room.wait())
        await asyncio.wait({work, asked}, return_when="FIRST_COMPLETED")
        asked.cancel()
    assert out.published == 20
    assert out.waiting_for == ""


async def test_an_empty_queue_admits_one_group_of_any_size() -> None:
    broker = Broker()
    out = publication(group(0, text="x" * 50_000))
    work = asyncio.create_task(broker.producer(max_queued_bytes=10).publish(out))
    await broker.asked_for_room.wait()
    assert broker.writes == [[0]]
    broker.queued = 0
    await work
    assert broker.sealed


async def test_a_full_shard_does_not_hold_up_another() -> None:
    broker = Broker()
    broker.queued = 10_000
    both = publication(group(0, shard="x"), group(1, shard="x"), group(2, shard="x"), group(3, shard="y"))
    work = asyncio.create_task(broker.producer(max_queued_bytes=100).publish(both))
    await broker.asked_for_room.wait()
    assert broker.writes == [[0, 1], [3]]
    broker.queued = -100_000
    await work


async def test_groups_refused_for_want_of_memory_are_written_again_and_no_other() -> None:
    broker = Broker()
    broker.refusals = [{1: BrokerFullError("OOM")}, {1: BrokerFullError("OOM")}]
    out = publication(group(0), group(1))
    await broker.producer().publish(out)
    assert broker.writes == [[0, 1], [1], [1]]
    assert out.published == 2


async def test_nothing_is_published_while_the_memory_is_over_its_share() -> None:
    broker = Broker()
    broker.memory = "maxmemory:100\r\nused_memory:71"
    out = publication(group(0))
    work = asyncio.create_task(broker.producer().publish(out))
    await until(lambda: "memory is over 70%" in out.waiting_for)
    assert "`rolloutbus dead list`, `dead drop`" in out.waiting_for
    assert broker.writes == []
    broker.memory = "maxmemory:100\r\nused_memory:69"
    await work
    assert broker.writes == [[0]]


async def test_a_stream_that_was_deleted_is_made_again() -> None:
    broker = Broker()
    broker.refusals = [{0: Published("no-stream", "", 0)}]
    out = publication(group(0), group(1))
    await broker.producer().publish(out)
    assert len(broker.opened) == 2
    assert broker.writes == [[0, 1], [0]]


async def test_a_group_that_is_there_already_counts_once() -> None:
    broker = Broker()
    out = publication(group(0), group(1))
    producer = broker.producer()
    await producer.publish(out)
    broker.refusals = [{0: Published("repeated", "", 7)}]
    await producer.publish(out)
    assert out.published == 2
    assert out.entries[0] == "1-0"


async def test_what_the_broker_lost_is_published_again_or_told_of_before_the_batch_is_sealed() -> None:
    broker = Broker()
    out = publication(group(0), group(1), group(2, shard="y"))
    producer = broker.producer()
    await producer.publish(out)
    before = len(broker.writes)
    await producer.republish(out, [out.groups[1], out.groups[2]], {0: "handed"})
    assert sorted(broker.writes[before:]) == [[1], [2]]
    assert broker.opened[-1].groups == 3
    assert broker.sealed == [("b", before, {}), ("b", before + 2, {0: "handed"})]
    assert out.published == 3


async def test_a_replayed_group_tells_its_origin_however_often_it_is_published() -> None:
    broker, origin = Broker(), ReplayOrigin("first", 7, "trainer", 14, "5-1", 2)
    out = Publication("b", [group(0)], 2, origin)
    producer = broker.producer()
    await producer.publish(out)
    assert broker.origins == {0: origin}
    broker.origins.clear()
    await producer.republish(out, out.groups, {})
    assert broker.origins == {0: origin}


async def test_a_batch_that_cannot_be_sealed_is_an_error() -> None:
    broker = Broker()

    async def unfinished(batch: str, checksums: str = "") -> str:
        return "unfinished"

    broker.seal = unfinished
    out = publication(group(0))
    with pytest.raises(BatchError, match="batch b could not be sealed"):
        await broker.producer().publish(out)


@pytest.mark.parametrize("value", [{1, 2}, Decimal("1"), 2**64, object()])
async def test_a_row_the_codec_cannot_take_is_named_with_the_path(value: Any) -> None:
    broker = Broker()
    bad = group(1)
    bad.rows[1]["responses_create_params"] = {"input": [0, value]}
    with pytest.raises(EncodeError, match=r"row 3.*responses_create_params.*input.*1"):
        await broker.producer().publish(publication(group(0), bad))


async def test_a_payload_above_the_limit_names_row_and_size() -> None:
    producer = Broker().producer(max_payload_bytes=100)
    with pytest.raises(PayloadTooLargeError, match=r"begins at row 2 is \d+ bytes, above max_payload_bytes \(100\)"):
        await producer.publish(publication(group(1, text="x" * 1000)))


async def test_the_batch_keeps_a_checksum_of_each_groups_rows() -> None:
    """In the order of the groups, whatever the order in which shards are written."""
    broker = Broker()
    groups = [group(at, shard="xy"[at % 2], text=str(at)) for at in range(10)]
    await broker.producer().publish(publication(*groups))
    assert broker.checksums == "".join(checksum(encode_group("b", one)) for one in groups)
    assert len(broker.checksums) == 10 * CHECKSUM_LENGTH
    assert len({broker.checksums[at : at + CHECKSUM_LENGTH] for at in range(0, 80, CHECKSUM_LENGTH)}) == 10


async def test_a_batch_of_which_not_all_was_packed_here_keeps_the_checksums_that_it_had() -> None:
    """A client that resumed it without rows has nothing to publish again; one with rows publishes what is missing."""
    broker, groups = Broker(), [group(at, text=str(at)) for at in range(3)]
    await broker.producer().republish(publication(*groups), groups[:1], {})
    assert broker.checksums == ""
    known = publication(*groups)
    known.checksums.update({0: "0" * CHECKSUM_LENGTH, 1: "1" * CHECKSUM_LENGTH, 2: "2" * CHECKSUM_LENGTH})
    await broker.producer().republish(known, [], {})
    assert broker.checksums == "0" * CHECKSUM_LENGTH + "1" * CHECKSUM_LENGTH + "2" * CHECKSUM_LENGTH


VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=40), lambda inner: st.dictionaries(st.text(max_size=3), inner)
)


@given(VALUES)
def test_a_checksum_is_of_values_and_not_of_objects(value: Any) -> None:
    """Rows that a trainer reads from a file again share nothing, where those that it published shared their prompt."""
    large = {"value": value, "texts": ["x" * (1 << 17)], "numbers": list(range(40_000))}
    params: list[Any] = [large, large, copy.deepcopy(large), json.loads(json.dumps(large))]
    for rows in params[:2], params[1:3], params[2:]:
        one = group(0)
        for row, params_of_row in zip(one.rows, rows, strict=True):
            row["responses_create_params"] = params_of_row
        assert checksum(encode_group("b", one)) == checksum(encode_group("b", shared_group(large)))


def test_large_dicts_with_numbers_as_keys_are_the_same_as_their_copies() -> None:
    """Keys that are no texts counted as the same only where they were one object."""
    large: dict[Any, Any] = {5_000 + at: "x" * 10 for at in range(8_000)} | {b"bytes": True}
    one = group(0)
    for row in one.rows:
        row["responses_create_params"] = {int(str(5_000 + at)): "x" * 10 for at in range(8_000)} | {b"bytes": True}
    assert checksum(encode_group("b", one)) == checksum(encode_group("b", shared_group(large)))


def shared_group(params: Any) -> PromptGroup:
    one = group(0)
    for row in one.rows:
        row["responses_create_params"] = params
    return one


def test_a_group_goes_out_with_its_own_indices_whatever_was_stamped_meanwhile() -> None:
    one = group(3)
    for row in one.rows:
        row["_rowidx"] = 99
    outgoing = encode_group("b", one)
    assert [row["_rowidx"] for row in decoded(outgoing)] == [6, 7]
    assert [row["_rowidx"] for row in one.rows] == [99, 99]

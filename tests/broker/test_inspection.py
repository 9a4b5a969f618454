"""Inspection on real servers: what it finds, what it tells of strangers, and that it changes nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from rolloutbus.broker.channel import Command, Link
from rolloutbus.broker.dead_letters import drop_dead_letters, find_dead_letter, read_dead_letters, read_rows
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import DecodeError, UnknownBatchError
from rolloutbus.broker.group_life import batches_there, known_batches, read_group_life
from rolloutbus.broker.inspection import find_runs, inspect_run
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings

RUN = "looked.at-1"
KEYS = Keys(RUN)


@pytest.fixture(params=["valkey", "redis_7"])
async def link(request: pytest.FixtureRequest) -> AsyncIterator[Link]:
    """A link to a server without a key of ours."""
    server: EmbeddedBroker = request.getfixturevalue(request.param)
    link = Link(BrokerSettings(url=server.url), "test")
    yield link
    names = (await link.run([("KEYS", KEYS.prefix + "*")]))[0]
    await link.run([("DEL", name) for name in names])
    await link.close()


async def add_group(link: Link, shard: str, batch: str = "b", group: int = 0) -> str:
    fields = ("kind", "group", "batch", batch, "group", group, "route", "r", "payload", b"\xff" * 100)
    return (await link.run([("XADD", KEYS.groups(shard), "*", *fields)]))[0].decode()


async def test_a_run_without_keys_is_empty_and_not_found(link: Link) -> None:
    state = await inspect_run(link, RUN)
    assert (state.fleet, state.shards, state.batches, state.dead_letters) == (False, (), (), 0)
    assert RUN not in await find_runs(link)


async def test_groups_are_counted_by_what_they_wait_for(link: Link) -> None:
    entries = [await add_group(link, "math", group=group) for group in range(6)]
    stream = KEYS.groups("math")
    await link.run(
        [
            ("XGROUP", "CREATE", stream, "workers", "0"),
            ("XREADGROUP", "GROUP", "workers", "math:1", "COUNT", 4, "STREAMS", stream, ">"),
            ("XACK", stream, "workers", entries[2], entries[3]),
            ("ZADD", KEYS.delayed("math"), 1, f"b 2 {entries[2]} -"),
            ("ZADD", KEYS.parked("math"), 1, f"b 3 {entries[3]}"),
        ]
    )
    (shard,) = (await inspect_run(link, RUN)).shards
    assert (shard.unfinished, shard.queued, shard.running, shard.delayed, shard.parked) == (6, 2, 2, 1, 1)
    assert shard.oldest_age_s is not None
    assert shard.oldest_age_s < 20


async def test_a_shard_is_seen_by_its_record_alone_and_by_its_work_alone(link: Link) -> None:
    await link.run([("HSET", KEYS.shards, "words", json.dumps({"replicas": 3, "slots": 7, "lost": "no budget"}))])
    await link.run([("HSET", KEYS.routes, "sort", "words", ":version", "1")])
    await add_group(link, "orphan")
    words, orphan = (await inspect_run(link, RUN)).shards
    assert (words.shard, words.replicas, words.slots, words.lost, words.routes) == (
        "words",
        3,
        7,
        "no budget",
        ("sort",),
    )
    assert (words.unfinished, words.oldest_age_s) == (0, None)
    assert (orphan.shard, orphan.replicas, orphan.queued) == ("orphan", 0, 1)


async def test_a_record_that_is_none_is_taken_for_an_empty_one(link: Link) -> None:
    await link.run([("HSET", KEYS.shards, "math", "{not json")])
    assert [shard.shard for shard in (await inspect_run(link, RUN)).shards] == ["math"]


async def test_dead_letters_of_strangers_are_listed_too(link: Link) -> None:
    await link.run(
        [("XADD", KEYS.dead, "*", "reason", "foreign", "detail", "no kind", "group", "x", "failure", b"\xc1")]
    )
    (letter,) = await read_dead_letters(link, KEYS)
    assert (letter.batch, letter.group, letter.reason) == ("-", -1, "foreign: no kind")
    assert letter.failure is not None
    assert letter.failure.type == "UnreadableFailure"
    with pytest.raises(DecodeError, match="no rows with it"):
        await read_rows(link, KEYS, letter)


async def test_all_dead_letters_are_read_and_the_newest_of_a_group_is_found(link: Link) -> None:
    words = ("reason", "r", "batch", "b", "payload", b"\xff" * 1000)
    ids = [
        reply.decode()
        for reply in await link.run([("XADD", KEYS.dead, "*", "group", n % 13, *words) for n in range(25)])
    ]
    letters = await read_dead_letters(link, KEYS)
    assert [letter.entry for letter in letters] == ids
    assert {letter.payload_bytes for letter in letters} == {1000}
    assert (await find_dead_letter(link, KEYS, "b:3")).entry == ids[16]
    assert await drop_dead_letters(link, KEYS, ids[:5]) == 5
    with pytest.raises(UnknownBatchError, match="no dead letter"):
        await find_dead_letter(link, KEYS, ids[0])


async def test_a_groups_life_is_read_over_many_events(link: Link) -> None:
    def event(kind: str, group: int) -> tuple[str | int, ...]:
        return (
            "XADD",
            KEYS.events,
            "*",
            "kind",
            kind,
            "batch",
            "b",
            "group",
            group,
            "attempt",
            1,
            "instance",
            "m",
            "detail",
            "",
        )

    await link.run([event("published", 1)])
    await link.run([event("published", 2)] * 2500)
    await link.run([event("taken", 1)])
    life = await read_group_life(link, KEYS, "b", 1)
    assert [entry.kind for entry in life.events] == ["published", "taken"]
    assert not life.trimmed
    assert life.record is None


async def test_a_key_of_another_type_is_named_and_the_rest_is_told(link: Link) -> None:
    await link.run([("SET", key, "not ours") for key in (KEYS.groups("math"), KEYS.batch("b"), KEYS.dead, KEYS.routes)])
    await add_group(link, "words")
    state = await inspect_run(link, RUN)
    assert {shard.shard: shard.unfinished for shard in state.shards} == {"math": 0, "words": 1}
    assert sorted(what.partition(" ")[0] for what in state.unreadable) == [
        "batch:b:",
        "dead:",
        "groups:math:",
        "routes:",
    ]


@pytest.mark.parametrize("strange", [("delayed",), ("parked",), ("delayed", "parked"), ("groups", "parked")])
async def test_of_a_shards_keys_those_of_another_type_are_named_and_no_other(
    link: Link, strange: tuple[str, ...]
) -> None:
    """Whatever it was, `groups:` was named, and to delete that would lose the shard's work."""
    if "groups" not in strange:
        await add_group(link, "math")
    await link.run([("SET", f"{KEYS.prefix}{kind}:math", "not ours") for kind in strange])
    state = await inspect_run(link, RUN)
    assert state.unreadable == tuple(f"{kind}:math: it is of another type" for kind in strange)


async def test_fields_that_are_none_of_ours_are_named_and_the_rest_is_told(link: Link) -> None:
    await link.run(
        [
            ("HSET", KEYS.shards, "s", "{{{", b"\xff", "1", "t", '{"replicas": 2}'),
            ("HSET", KEYS.instance("t/0"), "pid", "x", "slots", "\x1b[2J", "running", "1"),
            ("HSET", KEYS.batch("b"), "client", "c", "groups", "x", "rows", "4", b"\xff", b"\xff"),
            ("HSET", KEYS.batch("orphan"), "state", "open"),
            ("SET", KEYS.owner("c"), "nobody"),
        ]
    )
    state = await inspect_run(link, RUN)
    assert {shard.shard: shard.replicas for shard in state.shards} == {"s": 1, "\ufffd": 1, "t": 2}
    (instance,) = next(shard.instances for shard in state.shards if shard.shard == "t")
    assert (instance.pid, instance.running, instance.slots) == (0, 1, 0)
    batch = state.batch("b")
    assert batch is not None
    assert (batch.groups, batch.rows, batch.client_seen_s) == (0, 4, None)
    named = " ".join(state.unreadable)
    for what in (
        "record of 's'",
        "instance:t/0: pid 'x'",
        "instance:t/0: slots",
        "batch:b: groups 'x'",
        "batch:orphan:",
    ):
        assert what in named


@pytest.mark.parametrize("number", ["9" * 30, "9" * 400])
async def test_numbers_that_cannot_be_are_told_as_such_and_end_nothing(link: Link, number: str) -> None:
    """One of them, written by hand, ended `status` of the whole run with a traceback."""
    record = f"running 1 token math 1-1 0 0 0 10 {number}"
    batch = ("client", "c", "state", "sealed", "groups", "1", "opened", number, "g:0", record)
    await link.run([("HSET", KEYS.batch("b"), *batch), ("SET", KEYS.owner("c"), f"x {number}")])
    state = await inspect_run(link, RUN)
    assert [one.client_seen_s for one in state.batches] == [None]
    assert any("opened" in what for what in state.unreadable)
    assert all(shard.longest is None for shard in state.shards)
    assert (await read_group_life(link, KEYS, "b", 0)).unreadable


async def test_a_batchs_client_is_not_whoever_has_its_name_now(link: Link) -> None:
    """A dead trainer's batch looked as if its trainer were there."""
    now_ms = int((await link.run([("TIME",)]))[0][0]) * 1000
    batches = [("HSET", KEYS.batch(owner), "client", "c", "owner", owner) for owner in ("alive", "dead")]
    await link.run([*batches, ("SET", KEYS.owner("c"), f"alive {now_ms}")])
    seen = {one.batch: one.client_seen_s is not None for one in (await inspect_run(link, RUN)).batches}
    assert seen == {"alive": True, "dead": False}


async def test_a_client_alone_makes_no_run(link: Link) -> None:
    """A trainer of a mistyped run that was killed while it waited left its lease, and no command knew which run."""
    await link.run([("SET", KEYS.owner("c"), "x 1", "PX", 60_000)])
    assert RUN not in await find_runs(link)


async def test_a_key_that_no_run_can_have_hides_no_run(link: Link) -> None:
    stranger = "rolloutbus:{a b}:routes"
    await add_group(link, "math")
    await link.run([("SET", stranger, "1")])
    assert RUN in await find_runs(link)
    assert "a b" not in await find_runs(link)
    await link.run([("DEL", stranger)])


async def test_a_life_with_a_record_and_events_of_strangers_is_told_all_the_same(link: Link) -> None:
    await link.run(
        [
            ("HSET", KEYS.batch("b"), "state", "open", "g:0", "junk"),
            ("XADD", KEYS.events, "*", b"\xff", b"\xfe"),
            ("XADD", KEYS.events, "*", "kind", "taken", "batch", "b", "group", "0", "attempt", "many"),
        ]
    )
    life = await read_group_life(link, KEYS, "b", 0)
    assert (life.record, life.unreadable) == (None, True)
    assert [(event.kind, event.attempt) for event in life.events] == [("taken", 0)]


async def test_looking_changes_nothing(link: Link) -> None:
    await add_group(link, "math")
    await link.run([("HSET", KEYS.batch("b"), "state", "open", "client", "c", "g:0", "queued 0 - - - 0 0 0 9 0")])
    before = await link.run([("DUMP", KEYS.groups("math")), ("DUMP", KEYS.batch("b"))])
    state = await inspect_run(link, RUN)
    await read_group_life(link, KEYS, "b", 0)
    assert state.batch("b") is not None
    assert await link.run([("DUMP", KEYS.groups("math")), ("DUMP", KEYS.batch("b"))]) == before


def running(first_take_ms: int, accepted: int = 0) -> str:
    return f"running 1 token math/0 1-0 0 0 {accepted} 9 {first_take_ms}"


async def now_ms(link: Link) -> int:
    now = (await link.run([("TIME",)]))[0]
    return int(now[0]) * 1000 + int(now[1]) // 1000


async def test_a_shard_tells_which_of_its_groups_has_run_for_longest(link: Link) -> None:
    now = await now_ms(link)
    await add_group(link, "math")
    records = ("g:0", running(now - 60_000), "g:1", running(now - 600_000, accepted=3))
    await link.run(
        [
            ("HSET", KEYS.shards, "math", json.dumps({"replicas": 1, "commit": "group", "group_timeout_s": 3600})),
            ("HSET", KEYS.instance("math/0"), "shard", "math", "pid", "1", "running", "2", "slots", "4"),
            ("HSET", KEYS.batch("b"), "state", "sealed", "client", "c", "group_size", "8", *records),
        ]
    )
    (shard,) = (await inspect_run(link, RUN)).shards
    group = shard.longest
    assert group is not None
    assert (group.batch, group.group, group.instance, group.instance_alive) == ("b", 1, "math/0", True)
    assert (group.accepted_rows, group.rows) == (3, 8)
    assert 600 <= group.running_s < 660
    assert group.deadline_s == pytest.approx(3600 - group.running_s)
    assert (shard.commit, shard.group_timeout_s) == ("group", 3600)


async def test_a_cancelled_batch_is_not_among_those_that_go_on(link: Link) -> None:
    """It was counted as open, and what had run was shown as running."""
    now = await now_ms(link)
    await add_group(link, "math")
    for batch, state in (("a", "open"), ("b", "sealed"), ("c", "closed")):
        await link.run([("HSET", KEYS.batch(batch), "state", state, "client", "c")])
    await link.run([("HSET", KEYS.batch("c"), "g:0", running(now - 1000))])
    state = await inspect_run(link, RUN)
    assert sorted(batch.batch for batch in state.open_batches) == ["a", "b"]
    assert [batch.batch for batch in state.closed_batches] == ["c"]
    assert [shard.longest for shard in state.shards] == [None]


class Counting:
    """Passes on, and counts what goes to the broker."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.writes = self.commands = 0

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        self.writes += 1
        self.commands += len(commands)
        return await self._link.run(commands)


async def test_a_look_asks_as_often_for_many_groups_as_for_one(link: Link) -> None:
    async def asked() -> tuple[int, int]:
        counting = Counting(link)
        await inspect_run(counting, RUN)
        return counting.writes, counting.commands

    now = await now_ms(link)
    await add_group(link, "math")
    await link.run([("HSET", KEYS.batch("b"), "state", "open", "client", "c", "g:0", running(now))])
    for_one = await asked()
    await link.run([("HSET", KEYS.batch("b"), f"g:{group}", running(now)) for group in range(300)])
    assert await asked() == for_one


async def test_the_life_of_a_running_group_has_its_deadline_and_the_start_of_its_attempt(link: Link) -> None:
    now = await now_ms(link)
    taken = ("kind", "taken", "batch", "b", "group", 0, "instance", "math/0", "detail", "")
    record = running(now - 90_000, accepted=3).replace("running 1", "running 2")
    replies = await link.run(
        [
            ("HSET", KEYS.shards, "math", json.dumps({"group_timeout_s": 120})),
            ("HSET", KEYS.batch("b"), "state", "closed", "reason", "why not", "group_size", "8", "g:0", record),
            *(("XADD", KEYS.events, f"{at}-0", *taken, "attempt", attempt) for at, attempt in ((1000, 1), (2000, 2))),
        ]
    )
    assert replies[2:] == [b"1000-0", b"2000-0"]
    life = await read_group_life(link, KEYS, "b", 0)
    assert (life.shard, life.commit, life.group_timeout_s, life.rows) == ("math", "row", 120, 8)
    assert life.deadline_ms == now + 30_000
    assert life.attempt_since_ms == 2000
    assert (life.batch_state, life.batch_reason) == ("closed", "why not")


async def test_batches_are_known_by_record_event_and_dead_letter(link: Link) -> None:
    await link.run(
        [
            ("HSET", KEYS.batch("there"), "client", "c"),
            ("XADD", KEYS.events, "*", "kind", "taken", "batch", "over", "group", "0"),
            ("XADD", KEYS.events, "*", "kind", "instance-died", "batch", "-", "group", "-"),
            ("XADD", KEYS.dead, "*", "reason", "r", "batch", "dead", "group", "0", "payload", "x"),
        ]
    )
    assert await batches_there(link, KEYS) == {"there"}
    assert await known_batches(link, KEYS) == {"there", "over", "dead"}

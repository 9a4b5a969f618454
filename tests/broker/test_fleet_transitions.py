"""One fleet per run, its map published whole, and the wishes that reach it from elsewhere."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from rolloutbus.broker import fleet_requests
from rolloutbus.broker.channel import Link
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import FleetError
from rolloutbus.broker.fleet_requests import DONE, Request, ask_fleet
from rolloutbus.broker.fleet_transitions import FleetTransitions, Published, require_free
from rolloutbus.broker.keys import GROUP_NAME, Keys
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.shard_records import ShardRecord
from rolloutbus.producer import read_route_map

MAP = Published(
    {"add": "math", "sort": "words"}, {"math": ShardRecord(labels=["math"]), "words": ShardRecord(replicas=2)}
)
OTHER = Published({"add": "words"}, {"words": ShardRecord()})
SHARDS = ["math", "words"]


@pytest.fixture(params=["valkey", "redis_7"])
async def link(request: pytest.FixtureRequest) -> AsyncIterator[Link]:
    server: EmbeddedBroker = request.getfixturevalue(request.param)
    settings = BrokerSettings(url=server.url, lease_s=1.0, renew_every_s=0.2)
    opened = Link(settings, "test", load_scripts)
    yield opened
    await opened.close()


@pytest.fixture
def keys() -> Keys:
    return Keys(f"fleet-{secrets.token_hex(4)}")


def fleet(link: Link, keys: Keys, holder: str = "host-a, process 1") -> FleetTransitions:
    return FleetTransitions(link, keys, link.settings, holder)


async def names(link: Link, keys: Keys) -> set[str]:
    found = (await link.run([("KEYS", keys.prefix + "*")]))[0]
    return {key.decode().removeprefix(keys.prefix) for key in found}


async def first_wishes(mine: FleetTransitions, identity: str) -> Sequence[Request]:
    while True:
        wishes = (await mine.renew(SHARDS, MAP.version)).requests
        if any(wish.id == identity for wish in wishes):
            return wishes
        await asyncio.sleep(0.01)


async def test_a_second_fleet_is_refused_by_name_until_the_lease_runs_out(link: Link, keys: Keys) -> None:
    first, second = fleet(link, keys), fleet(link, keys, "host-b, process 2")
    await first.claim()
    await first.claim()
    with pytest.raises(FleetError, match=r"has a fleet already \(host-a, process 1\).*after 1 s"):
        await second.claim()
    with pytest.raises(FleetError, match="host-a"):
        await second.publish(MAP)
    with pytest.raises(FleetError, match=r"\(host-a, process 1\).*`rolloutbus up --replace`.*after 1 s"):
        await require_free(link, keys, link.settings)
    await asyncio.sleep((await link.run([("PTTL", keys.fleet)]))[0] / 1000 + 0.01)
    await require_free(link, keys, link.settings)
    await second.claim()


async def test_what_is_published_is_what_producers_read(link: Link, keys: Keys) -> None:
    mine = fleet(link, keys)
    await mine.publish(OTHER)
    await mine.publish(MAP)
    found = await read_route_map(link, keys)
    assert found is not None
    assert found.routes == MAP.routes
    assert {name: (r.replicas, r.labels) for name, r in found.shards.items()} == {
        "math": (1, ["math"]),
        "words": (2, []),
    }
    ttls = await link.run([("PTTL", key) for key in (keys.fleet, keys.routes, keys.shards)])
    assert all(ttl > 0 for ttl in ttls)


async def test_other_routes_wait_for_open_batches_and_equal_ones_do_not(link: Link, keys: Keys) -> None:
    first, second = fleet(link, keys), fleet(link, keys)
    await first.publish(MAP)
    await link.run([("HSET", keys.batch("b7"), "state", "sealed")])
    with pytest.raises(FleetError, match=r"open batches, b7 among them.*rolloutbus cancel b7"):
        await second.publish(OTHER, replace=True)
    assert (await first.renew(SHARDS, MAP.version)).status == "ok", "a refused one has taken nothing"
    await second.publish(Published(MAP.routes, {"math": ShardRecord(replicas=3)}), replace=True)
    await link.run([("HSET", keys.batch("b7"), "state", "closed")])
    await second.publish(OTHER)
    assert (await first.renew(SHARDS, MAP.version)).status == "lost"


async def test_a_renewal_says_what_the_broker_forgot(link: Link, keys: Keys) -> None:
    mine = fleet(link, keys)
    await mine.publish(MAP)
    await link.run([("XGROUP", "CREATE", keys.groups("math"), GROUP_NAME, "0", "MKSTREAM")])
    assert (await mine.renew(SHARDS, MAP.version)).status == "ok"
    assert (await link.run([("PTTL", keys.groups("math"))]))[0] > 0
    for forgotten in ([keys.shards], [keys.routes], [keys.fleet, keys.routes, keys.shards]):
        await link.run([("DEL", *forgotten)])
        assert (await mine.renew(SHARDS, MAP.version)).status == "gone"
        await mine.publish(MAP)


async def test_removal_leaves_only_streams_with_work(link: Link, keys: Keys) -> None:
    mine, other = fleet(link, keys), fleet(link, keys)
    await mine.publish(MAP)
    await link.run(
        [
            ("XGROUP", "CREATE", keys.groups("math"), GROUP_NAME, "0", "MKSTREAM"),
            ("ZADD", keys.delayed("math"), 0, "gone 0 1-1 -"),
            ("XADD", keys.groups("words"), "*", "batch", "b"),
            ("ZADD", keys.parked("words"), 0, "b 0 1-1"),
            ("HSET", keys.instance("math"), "pid", 1),
        ]
    )
    assert await other.remove(SHARDS, ["math"], MAP.version) == 0
    assert "routes" in await names(link, keys), "another fleet's run is left alone"
    assert await mine.remove(SHARDS, ["math"], MAP.version) == 1
    assert await names(link, keys) == {"groups:words", "parked:words"}


async def test_a_fleet_that_was_replaced_removes_what_its_successor_does_not_host(link: Link, keys: Keys) -> None:
    first, second = fleet(link, keys), fleet(link, keys)
    await first.publish(MAP)
    await second.publish(OTHER, replace=True)
    streams = [("XGROUP", "CREATE", keys.groups(shard), GROUP_NAME, "0", "MKSTREAM") for shard in SHARDS]
    await link.run(streams)
    await first.remove(SHARDS, ["math"], MAP.version)
    assert await names(link, keys) == {"fleet", "routes", "shards", "groups:words"}


async def test_a_fleet_that_published_nothing_gives_its_lease_back_and_nothing_else(link: Link, keys: Keys) -> None:
    """It took the routes of the fleet before with it, and a second try was not held to them: other routes under an open
    batch.
    """
    dead, refused, next_one = fleet(link, keys), fleet(link, keys), fleet(link, keys)
    await dead.publish(MAP)
    await link.run(
        [("DEL", keys.fleet), ("HSET", keys.batch("b7"), "state", "open"), ("HSET", keys.instance("math"), "pid", 1)]
    )
    await refused.claim()
    with pytest.raises(FleetError, match="open batches, b7 among them"):
        await refused.publish(OTHER)
    await refused.remove(SHARDS, ["math"], "")
    assert await names(link, keys) == {"routes", "shards", "batch:b7", "instance:math"}
    await next_one.claim()
    with pytest.raises(FleetError, match="open batches, b7 among them"):
        await next_one.publish(OTHER)


async def test_a_wish_stands_until_it_is_answered(link: Link, keys: Keys) -> None:
    mine, stands = fleet(link, keys), asyncio.Event()
    request = Request("id1", "scale:math", 3)
    with pytest.raises(FleetError, match="no fleet runs for run"):
        await ask_fleet(link, keys, link.settings, request, 1.0, stands.set)
    assert not stands.is_set(), "whoever asks is told so though nobody was asked"
    await mine.publish(MAP)
    asking = asyncio.create_task(ask_fleet(link, keys, link.settings, request, 5.0, stands.set))
    await stands.wait()
    wishes = await first_wishes(mine, "id1")
    assert (await mine.renew(SHARDS, MAP.version)).requests == wishes == [request]
    assert (request.verb, request.target) == ("scale", "math")
    await mine.answer(request, DONE)
    await asking
    assert (await link.run([("EXISTS", keys.fleet_requests)]))[0] == 0


async def test_a_mistake_is_told_while_the_fleet_is_busy_with_an_earlier_wish(link: Link, keys: Keys) -> None:
    """Half an hour later it would be told by the fleet."""
    mine, stands = fleet(link, keys), asyncio.Event()
    await mine.publish(MAP)
    await link.run([("HSET", keys.fleet_requests, "want:scale:words", "earlier 3")])

    async def ask(request: Request) -> None:
        await ask_fleet(link, keys, link.settings, request, 5.0, stands.set)

    with pytest.raises(FleetError, match=r"^drain word/1: .*'word/1' \(did you mean 'words/1'\?\); there are math, wo"):
        await ask(Request.to_drain("word/1"))
    with pytest.raises(FleetError, match=r"^scale maths: .*'maths' \(did you mean 'math'\?\); there are math, words$"):
        await ask(Request.to_scale("maths", 3))
    with pytest.raises(FleetError, match=r"^drain math: math is the last instance of shard math; scale it up first"):
        await ask(Request.to_drain("math"))
    assert not stands.is_set()
    assert (await link.run([("HKEYS", keys.fleet_requests)]))[0] == [b"want:scale:words"]


async def test_records_that_a_fleet_left_behind_are_not_held_against_anybody(link: Link, keys: Keys) -> None:
    mine = fleet(link, keys)
    await mine.publish(MAP)
    await link.run([("DEL", keys.fleet)])
    with pytest.raises(FleetError, match="no fleet runs for run"):
        await ask_fleet(link, keys, link.settings, Request.to_scale("chess", 3), 0.0)


async def test_an_instance_that_lives_may_be_drained_though_no_record_has_it_yet(link: Link, keys: Keys) -> None:
    mine = fleet(link, keys)
    await mine.publish(MAP)
    await link.run([("HSET", keys.instance("math/1"), "pid", 1)])
    with pytest.raises(FleetError, match="has not finished drain:math/1"):
        await ask_fleet(link, keys, link.settings, Request.to_drain("math/1"), 0.0)


async def test_whoever_waits_is_told_for_whom_and_what_else_it_was_asked_for(
    link: Link, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For half an hour nothing was said after the first word."""
    monkeypatch.setattr(fleet_requests, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(fleet_requests, "TOLD_EVERY_S", 0.3)
    mine, words = fleet(link, keys), asyncio.Queue[str]()
    await mine.publish(MAP)
    request = Request.to_scale("math", 3)
    asking = asyncio.create_task(ask_fleet(link, keys, link.settings, request, 20.0, waiting=words.put_nowait))
    assert await words.get() == "waiting for the fleet on host-a, process 1, to scale math 3 (0 s so far)"
    await link.run([("HSET", keys.fleet_requests, "want:drain:words/1", "other 0", "want:scale:words", "third 2")])
    others = "so far); it was asked to drain words/1, scale words 2 too"
    assert (await words.get()).endswith(others)
    await link.run([("DEL", keys.fleet)])
    link.watching_since = time.monotonic() + 60
    while "has no fleet now; one that lives is back within 1 s" not in (word := await words.get()):
        assert word.endswith(others)
    await mine.renew(SHARDS, MAP.version)
    await mine.answer(request, DONE)
    await asking


async def test_refusals_later_wishes_and_silence_are_told(link: Link, keys: Keys) -> None:
    mine = fleet(link, keys)
    await mine.publish(MAP)

    async def ask(identity: str, timeout_s: float = 5.0) -> None:
        await ask_fleet(link, keys, link.settings, Request(identity, "scale:math", 2), timeout_s)

    with pytest.raises(FleetError, match=r"has not finished scale:math within 0\.05 s"):
        await ask("slow", 0.05)
    first = asyncio.create_task(ask("first"))
    await first_wishes(mine, "first")
    second = asyncio.create_task(ask("second"))
    with pytest.raises(FleetError, match="superseded by a later request"):
        await first
    # Who was told so listens no more; an answer to it would stay as long as the fleet.
    await mine.answer(Request("first", "scale:math", 2), DONE)
    await mine.answer(Request("second", "scale:math", 2), "no room")
    with pytest.raises(FleetError, match="scale math: no room"):
        await second
    assert not (await mine.renew(SHARDS, MAP.version)).requests
    assert (await link.run([("HKEYS", keys.fleet_requests)]))[0] == [b"answer:slow"]
    third = asyncio.create_task(ask("third"))
    await first_wishes(mine, "third")
    await mine.remove(SHARDS, [], MAP.version)
    with pytest.raises(FleetError, match="went away before it answered"):
        await third


async def test_after_a_new_connection_a_fleet_is_not_taken_for_gone_before_it_could_renew(
    link: Link, keys: Keys
) -> None:
    """Found by chaos on a fleet: a broker came back without the lease, which had run out meanwhile, and `scale` was
    told that the living fleet had gone away.
    """
    patient = link.settings.model_copy(update={"lease_s": 5.0})
    mine = fleet(link, keys)
    await link.channel()
    link.watching_since = time.monotonic()
    request = Request("id1", "scale:math", 3)
    asking = asyncio.create_task(ask_fleet(link, keys, patient, request, 20.0))
    await asyncio.sleep(0.3)
    assert not asking.done()
    await mine.publish(MAP)
    await first_wishes(mine, "id1")
    await link.run([("DEL", keys.fleet)])
    await asyncio.sleep(0.3)
    assert not asking.done()
    await mine.renew(SHARDS, MAP.version)
    await mine.answer(request, DONE)
    await asking


async def test_whoever_asked_is_told_that_the_broker_has_lost_it(link: Link, keys: Keys) -> None:
    """It waited for half an hour."""
    mine = fleet(link, keys)
    await mine.publish(MAP)
    asking = asyncio.create_task(ask_fleet(link, keys, link.settings, Request("id1", "scale:math", 3), 20.0))
    await first_wishes(mine, "id1")
    await link.run([("DEL", keys.fleet_requests)])
    with pytest.raises(FleetError, match="has lost the request scale:math, or the run has another fleet"):
        await asking


async def test_an_answer_that_the_broker_has_lost_is_given_again(link: Link, keys: Keys) -> None:
    mine = fleet(link, keys)
    await mine.publish(MAP)
    request = Request("id1", "scale:math", 3)
    await link.run([("HSET", keys.fleet_requests, "want:scale:math", "id1 3")])
    await mine.answer_again(request)
    assert (await mine.renew(SHARDS, MAP.version)).requests == [request], "nothing was answered yet"
    await mine.answer(request, DONE)
    await link.run([("DEL", keys.fleet_requests), ("HSET", keys.fleet_requests, "want:scale:math", "id1 3")])
    await mine.answer_again(request)
    assert (await link.run([("HGETALL", keys.fleet_requests)]))[0] == [b"answer:id1", DONE.encode()]
    await link.run([("DEL", keys.fleet_requests)])
    await mine.answer_again(request)
    assert (await link.run([("EXISTS", keys.fleet_requests)]))[0] == 0, "nobody reads it any more"


async def test_a_wish_that_nobody_of_ours_wrote_is_one_to_refuse(link: Link, keys: Keys) -> None:
    """It ended the renewal of the fleet's lease, and a second fleet could have the run."""
    mine = fleet(link, keys)
    await mine.publish(MAP)
    await link.run([("HSET", keys.fleet_requests, "want:scale:math", "abc two", "want:\xff", b"\xff 3", "other", "1")])
    wishes = (await mine.renew(SHARDS, MAP.version)).requests
    assert wishes[0] == Request("abc", "scale:math", -1)
    assert [wish.verb for wish in wishes] == ["scale", "\xff"]


async def test_a_new_fleet_is_not_bound_by_old_wishes(link: Link, keys: Keys) -> None:
    await fleet(link, keys).publish(MAP)
    await link.run([("HSET", keys.fleet_requests, "want:scale:math", "old 9")])
    successor = fleet(link, keys)
    await successor.publish(MAP, replace=True)
    assert not (await successor.renew(SHARDS, MAP.version)).requests


async def test_the_dead_one_gives_its_groups_free_and_shows_no_life(link: Link, keys: Keys) -> None:
    groups, mine = keys.groups("math"), fleet(link, keys)
    await link.run(
        [
            ("XGROUP", "CREATE", groups, GROUP_NAME, "0", "MKSTREAM"),
            ("XADD", groups, "*", "batch", "b"),
            ("XREADGROUP", "GROUP", GROUP_NAME, "math:dead", "STREAMS", groups, ">"),
            ("HSET", keys.instance("math"), "incarnation", "dead"),
        ]
    )
    assert await mine.bury("math", "math", "math:dead", "dead") == 1
    pending = (await link.run([("XPENDING", groups, GROUP_NAME, "IDLE", link.settings.lease_ms, "-", "+", 10)]))[0]
    assert len(pending) == 1
    assert (await link.run([("EXISTS", keys.instance("math"))]))[0] == 0
    await link.run([("HSET", keys.instance("math"), "incarnation", "next")])
    await mine.bury("math", "math", "math:dead", "dead")
    assert (await link.run([("EXISTS", keys.instance("math"))]))[0] == 1, "its successor's record stays"

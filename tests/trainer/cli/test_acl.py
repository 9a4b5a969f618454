"""The roles of `acl` on a real server: each does its whole work, and is refused what is another's."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.exceptions import NoPermissionError
from rolloutbus.broker.client_transitions import ClientTransitions
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.fleet_requests import DONE, Request, ask_fleet
from rolloutbus.broker.fleet_transitions import FleetTransitions, Published
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.shard_records import ShardRecord
from rolloutbus.trainer.cli.acl_rules import PASSWORD, ROLES, rule, user_name
from rolloutbus.trainer.cli.targets import connected, observer_settings

from tests.servers import start_redis, start_valkey

from .conftest import ROUTE, RUN, SHARD, InstanceThread, Stage, call, comes_true, redis_at, rows_of, take

SECRET = "its-own"


@pytest.fixture(scope="module", params=[start_valkey, start_redis])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    """A broker with one user per role."""
    with request.param(tcp=True) as server:
        with redis_at(server.url) as admin:
            for role in ROLES:
                admin.execute_command(*rule(RUN, role, SECRET))
        yield server


@pytest.fixture
def guarded_broker(server: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    yield server
    with redis_at(server.url) as admin:
        admin.flushall()
        admin.acl_log_reset()


def refusals(broker: EmbeddedBroker) -> list[str]:
    """What the server refused to whom, but for what `doctor` asks and may do without."""
    with redis_at(broker.url) as admin:
        entries: list[dict[str, str]] = admin.acl_log()
    return [f"{entry['username']} {entry['object']}" for entry in entries if entry["object"] != "config|get"]


def url_of(broker: EmbeddedBroker, role: str) -> str:
    return broker.url.replace(f":{broker.password}@", f"{user_name(RUN, role)}:{SECRET}@")


def as_role(broker: EmbeddedBroker, role: str) -> Any:
    return redis_at(url_of(broker, role))


def test_worker_trainer_and_observer_do_their_whole_work(
    guarded_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", url_of(guarded_broker, "observer"))
    stage = Stage(guarded_broker)
    stage.url = url_of(guarded_broker, "worker")
    try:
        instance = stage.instance(slots=1)
        stage.url = url_of(guarded_broker, "trainer")
        batch = stage.batch(rows_of("ok", "fail", "wait"))
        take(batch, 2)
        comes_true(lambda: stage.status(batch, 2) == "running")
        assert call("status", "--json").json["runs"][0]["shards"][0]["running"] == 1
        assert call("explain", batch.id, "1", "--json").json["events"]
        letter = call("dead", "list", "--json").json["dead_letters"][0]["id"]
        assert "ValueError" in call("dead", "show", letter, "--rows").out
        assert call("doctor", "--json").json["findings"]
        instance.open_gate()
        take(batch, 1)
        asyncio.run(batch.cancel())
    finally:
        stage.strike()
    assert refusals(guarded_broker) == []


def test_operator_cancels_replays_and_drops_but_the_observer_may_not(
    guarded_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(guarded_broker)
    try:
        stage.instance(slots=1)
        batch = stage.batch(rows_of("fail", "wait", "wait"))
        stage.sealed(batch)
        take(batch, 1)
        monkeypatch.setenv("REDIS_URL", url_of(guarded_broker, "observer"))
        assert "NOPERM" in call("cancel", batch.id, code=1).said
        assert "NOPERM" in call("dead", "drop", "--all", code=1).said
        refused = call("scale", SHARD, "2", code=1).said
        assert "NOPERM" in refused
        assert "asked" not in refused
        monkeypatch.setenv("REDIS_URL", url_of(guarded_broker, "operator"))
        assert call("cancel", batch.id, "--json").json["cancelled_groups"] == 2
        assert call("dead", "replay", "--all", code=1).out.count('"failure"') == 2
        assert "1 dead letter dropped" in call("dead", "drop", "--all").out
    finally:
        stage.strike()


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("producer", ("XREAD", "STREAMS", "{results}", "0")),
        ("producer", ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", "{groups}", ">")),
        ("producer", ("XADD", "{dead}", "*", "a", "b")),
        ("collector", ("XGROUP", "CREATE", "{groups}", "mine", "0")),
        ("collector", ("HSET", "{routes}", "a", "b")),
        ("worker", ("HSET", "{routes}", "a", "b")),
        ("worker", ("SET", "{owner}", "me")),
        ("worker", ("XRANGE", "{dead}", "-", "+")),
        ("observer", ("HSET", "{batch}", "state", "closed")),
        ("observer", ("DEL", "{batch}")),
        ("observer", ("CONFIG", "GET", "requirepass")),
        ("trainer", ("HSET", "{shards}", "a", "b")),
        ("fleet", ("SET", "{owner}", "me")),
        ("operator", ("HSET", "{routes}", "a", "b")),
    ],
)
def test_each_role_is_refused_what_is_not_its_work(
    guarded_broker: EmbeddedBroker, role: str, command: tuple[str, ...]
) -> None:
    keys = Keys(RUN)
    names = {
        "results": keys.results("trainer", SHARD), "groups": keys.groups(SHARD), "dead": keys.dead,
        "routes": keys.routes,
        "shards": keys.shards, "owner": keys.owner("trainer"), "batch": keys.batch("b"),
    }  # fmt: skip
    words = [names[word[1:-1]] if word.startswith("{") else word for word in command]
    with as_role(guarded_broker, role) as client, pytest.raises(NoPermissionError):
        client.execute_command(*words)


@pytest.mark.parametrize("role", list(ROLES))
@pytest.mark.parametrize(
    "command", [("FLUSHALL",), ("KEYS", "*"), ("ACL", "LIST"), ("SHUTDOWN",), ("SET", "foreign", "1")]
)
def test_no_role_may_rule_the_server_or_touch_foreign_keys(
    guarded_broker: EmbeddedBroker, role: str, command: tuple[str, ...]
) -> None:
    with as_role(guarded_broker, role) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)
    with as_role(guarded_broker, role) as client, pytest.raises(NoPermissionError):
        client.hgetall(Keys("exp2").shards)


def test_the_printed_lines_are_the_rules_and_hold_no_password() -> None:
    shown = call("acl", "--run", RUN, "--role", "worker")
    assert shown.out == " ".join(rule(RUN, "worker")) + "\n"
    assert set(call("acl", "--run", RUN, "--json").json) == set(ROLES)


@pytest.mark.tools("redis-cli")
def test_a_printed_line_can_be_typed_into_redis_cli(guarded_broker: EmbeddedBroker) -> None:
    line = call("acl", "--run", RUN, "--role", "operator").out.replace(f">{PASSWORD}", f">{SECRET}")
    typed = subprocess.run(
        ["redis-cli", "-p", str(urlsplit(guarded_broker.url).port)],
        env={"PATH": os.environ["PATH"], "REDISCLI_AUTH": str(guarded_broker.password)},
        input=line, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert typed.stdout.strip() == "OK"


def test_a_fleet_does_its_whole_work_and_an_operator_asks_it(guarded_broker: EmbeddedBroker) -> None:
    """Its instances too: they connect with the fleet's own user."""
    keys = Keys(RUN)
    fleet_settings = BrokerSettings(url=url_of(guarded_broker, "fleet"))
    published = Published({ROUTE: SHARD}, {SHARD: ShardRecord()})

    operators = observer_settings(url_of(guarded_broker, "operator"))

    async def work() -> None:
        async with connected(fleet_settings) as link, connected(operators) as operator:
            fleet = FleetTransitions(link, keys, fleet_settings, "a test")
            await fleet.claim()
            await fleet.publish(published)
            wish = Request("1", f"scale:{SHARD}", 2)
            asked = asyncio.create_task(ask_fleet(operator, keys, fleet_settings, wish, 10.0))
            with redis_at(guarded_broker.url) as admin:
                await asyncio.to_thread(comes_true, lambda: admin.exists(keys.fleet_requests))
                (request,) = (await fleet.renew([SHARD], published.version)).requests
                await fleet.answer(request, DONE)
                await asked
                thread = await asyncio.to_thread(InstanceThread, fleet_settings.url, SHARD, 1)
                await asyncio.to_thread(comes_true, lambda: admin.exists(keys.instance(SHARD)))
            await asyncio.to_thread(thread.stop)
            await fleet.bury(SHARD, SHARD, f"{SHARD}:gone", "gone")
            await fleet.remove([SHARD], [SHARD], published.version)

    asyncio.run(work())
    assert refusals(guarded_broker) == []


def test_a_collector_sets_a_foreign_result_aside_and_a_fleet_that_lost_its_run_leaves_the_others_shards(
    guarded_broker: EmbeddedBroker,
) -> None:
    """Both are rare, and were refused."""
    keys = Keys(RUN)
    results = keys.results("trainer", SHARD)
    settings = {role: BrokerSettings(url=url_of(guarded_broker, role)) for role in ("collector", "fleet")}

    async def work(entry: str) -> tuple[int, list[str]]:
        async with connected(settings["collector"]) as link:
            collector = ClientTransitions(link, keys, settings["collector"], "trainer", "mine")
            await collector.set_aside(SHARD, entry, "no result of ours")
        async with connected(settings["fleet"]) as link:
            new, old = (FleetTransitions(link, keys, settings["fleet"], who) for who in ("new", "old"))
            await new.publish(Published({ROUTE: SHARD}, {SHARD: ShardRecord()}))
            return await old.remove([SHARD], [], ""), refusals(guarded_broker)

    with redis_at(guarded_broker.url) as admin:
        assert asyncio.run(work(admin.xadd(results, {"who": "knows"}))) == (0, [])
        assert (admin.xlen(results), admin.xlen(keys.dead)) == (0, 1)


def test_users_of_no_named_run_are_said_to_be_of_the_default_one() -> None:
    """Whoever left --run out got users that may touch nothing of his run, without a word."""
    unnamed, named = (
        call("acl", "--role", "worker", "--json"),
        call("acl", "--role", "worker", "--run", "default", "--json"),
    )
    assert "users of the run 'default'" in unnamed.said
    assert (named.out, named.said) == (unnamed.out, "")

"""`doctor`: what is wrong is found, has a remedy, and gives exit code 1."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.inspection import BatchState, RunState
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.trainer.cli import targets
from rolloutbus.trainer.cli.diagnosis import (
    Finding,
    KeyFact,
    check_clock,
    check_keys,
    check_run,
    check_server,
    check_settings,
)

from .conftest import RUN, SHARD, Stage, call, comes_true, rows_of

SOUND = {
    "redis_version": "8.0.0", "uptime_in_seconds": "10", "aof_enabled": "1", "maxmemory_policy": "noeviction",
    "used_memory": "10", "maxmemory": "1000",
}  # fmt: skip
CONFIG = {"timeout": "0", "appendfsync": "everysec"}
SETTINGS = BrokerSettings()


def levels(*findings: Finding) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def test_a_sound_server_is_ok_throughout() -> None:
    assert set(levels(*check_server(SOUND, CONFIG, SETTINGS)).values()) == {"ok"}


@pytest.mark.parametrize(
    ("info", "config", "check", "level"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, {}, "eviction policy", "wrong"),
        ({"used_memory": "800"}, {}, "memory headroom", "wrong"),
        ({"maxmemory": "0"}, {}, "memory headroom", "warning"),
        ({"aof_enabled": "0"}, {}, "persistence", "warning"),
        ({"aof_last_write_status": "err"}, {}, "persistence", "wrong"),
        ({}, {"appendfsync": "no"}, "persistence", "warning"),
        ({}, {"timeout": "5"}, "idle connections", "warning"),
        ({"cluster_enabled": "1"}, {}, "cluster", "warning"),
        ({"role": "slave", "master_host": "b", "master_port": "6379"}, {}, "role", "wrong"),
        ({"role": "slave", "slave_read_only": "0"}, {}, "role", "wrong"),
        ({"min_slaves_good_slaves": "1"}, {"min-replicas-to-write": "2"}, "replicas", "wrong"),
        ({}, {"client-output-buffer-limit": "normal 1048576 0 0 slave 0 0 0"}, "reply size", "wrong"),
        ({}, {"client-output-buffer-limit": "slave 0 0 0 normal 0 1048576 5"}, "reply size", "warning"),
        ({"connected_clients": "95", "maxclients": "100"}, {}, "connections", "warning"),
    ],
)
def test_each_fault_of_a_server_has_a_level_and_a_remedy(
    info: dict[str, str], config: dict[str, str], check: str, level: str
) -> None:
    findings = list(check_server({**SOUND, **info}, {**CONFIG, **config}, SETTINGS))
    assert levels(*findings)[check] == level
    assert next(finding for finding in findings if finding.check == check).remedy


def test_memory_that_is_full_may_be_full_of_dead_letters() -> None:
    findings = check_server({**SOUND, "used_memory": "800"}, CONFIG, SETTINGS)
    remedy = next(finding.remedy for finding in findings if finding.check == "memory headroom")
    assert "`rolloutbus dead list`, `dead drop`" in remedy


def test_what_may_not_be_read_is_unknown_and_not_wrong() -> None:
    found = levels(*check_server({**SOUND, "min_slaves_good_slaves": "1"}, None, SETTINGS))
    assert {check for check, level in found.items() if level == "unknown"} == {
        "idle connections", "replicas", "reply size",
    }  # fmt: skip


def test_limits_that_nothing_reaches_are_no_finding() -> None:
    limits = "normal 0 0 0 slave 1048576 1048576 60 pubsub 1048576 0 0"
    roomy = {**CONFIG, "client-output-buffer-limit": limits, "min-replicas-to-write": "1"}
    info = {**SOUND, "role": "master", "min_slaves_good_slaves": "1", "connected_clients": "5", "maxclients": "100"}
    assert set(levels(*check_server(info, roomy, SETTINGS)).values()) == {"ok"}


@pytest.mark.parametrize("change", [{"renew_every_s": 15.0}, {"command_timeout_s": 30.0}, {"block_s": 40.0}])
def test_times_that_cost_leases_are_wrong(change: dict[str, float]) -> None:
    assert check_settings(SETTINGS).level == "ok"
    assert check_settings(SETTINGS.model_copy(update=change)).level == "wrong"


def test_a_clock_that_is_off_is_a_warning() -> None:
    assert levels(*check_clock(0.2, 0.01, "here", []))["broker's clock"] == "ok"
    assert levels(*check_clock(-90.0, 0.01, "here", []))["broker's clock"] == "warning"
    assert levels(*check_clock(0.0, 0.2, "here", []))["answer time"] == "warning"


def test_keys_without_tag_or_expiry_are_found() -> None:
    prefix = "rolloutbus:{exp1}:"
    sound = [KeyFact(prefix + "events", "stream", -1), KeyFact(prefix + "routes", "hash", 1000)]
    assert levels(*check_keys(sound, [prefix])) == {"hash tags": "ok"}
    stray, eternal = KeyFact("rolloutbus:exp1:routes", "hash", 5), KeyFact(prefix + "batch:b", "hash", -1)
    found = list(check_keys([*sound, stray, eternal], [prefix]))
    assert levels(*found) == {"hash tags": "wrong", "expiry": "wrong"}
    assert "rolloutbus:exp1:routes" in found[0].what
    assert "batch:b" in found[1].what


def test_a_run_that_is_over_is_not_stale() -> None:
    over = RunState(RUN, False, (), (), 0, 12)
    assert levels(*check_run(over, SETTINGS)) == {f"run {RUN}": "ok"}
    assert levels(*check_run(dataclasses.replace(over, dead_letters=2), SETTINGS)) == {f"run {RUN}": "warning"}


def test_a_cancelled_batch_is_not_counted_as_open_and_needs_no_client() -> None:
    closed = BatchState("b", "c", "closed", "why", 1, 1, 1, 0, 0, 1, {"running": 1}, 0, 1.0, None)
    (finding,) = check_run(RunState(RUN, True, (), (closed,), 0, 1), SETTINGS)
    assert (finding.level, finding.what) == ("ok", "0 instances, 0 open batches, 1 closed")


def test_doctor_is_content_with_a_run_at_work(stage: Stage) -> None:
    stage.instance()
    batch = stage.batch(rows_of("wait"))
    comes_true(lambda: stage.status(batch, 0) == "running")
    findings = call("doctor", "--json").json["findings"]
    assert not [finding for finding in findings if finding["level"] == "wrong"]
    assert {"server version", "persistence", "eviction policy", "memory headroom", "timeouts"} <= {
        f["check"] for f in findings
    }
    shown = call("doctor").out
    assert max(map(len, shown.splitlines())) <= 80


def test_doctor_finds_what_was_broken_on_a_real_broker(stage: Stage) -> None:
    stage.redis.config_set("maxmemory-policy", "allkeys-lru")
    stage.redis.hset("rolloutbus:nobody:routes", "a", "b")
    stage.redis.xadd(stage.keys.groups(SHARD), {"kind": "group"})
    found = {finding["check"]: finding for finding in call("doctor", "--json", code=1).json["findings"]}
    for check in ("eviction policy", "hash tags", "expiry", "consumer groups", f"run {RUN}"):
        assert found[check]["level"] == "wrong"
        assert found[check]["remedy"]


def test_doctor_says_that_there_is_no_broker_and_no_password(broker: EmbeddedBroker) -> None:
    said = call("doctor", "--broker-url", "redis://:topsecret@127.0.0.1:1/0", code=1).out
    assert "connection" in said
    assert "topsecret" not in said
    wrong = broker.url.replace(str(broker.password), "topsecret")
    refused = " ".join(call("doctor", "--broker-url", wrong, code=1).out.split())
    assert "wrong" in refused
    assert "topsecret" not in refused


def test_doctor_finds_what_stops_every_write_or_read_of_a_real_broker(stage: Stage) -> None:
    stage.redis.config_set("min-replicas-to-write", "1")
    stage.redis.config_set("client-output-buffer-limit", "normal 1mb 0 0")
    found = {finding["check"]: finding["level"] for finding in call("doctor", "--json", code=1).json["findings"]}
    assert (found["replicas"], found["reply size"]) == ("wrong", "wrong")


def test_doctor_finds_that_the_server_is_a_replica(stage: Stage) -> None:
    stage.redis.replicaof("127.0.0.1", 1)
    found = {finding["check"]: finding for finding in call("doctor", "--json", code=1).json["findings"]}
    assert found["role"]["level"] == "wrong"
    assert "127.0.0.1:1" in found["role"]["remedy"]


def test_a_server_that_accepts_and_says_nothing_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"redis://127.0.0.1:{deaf.getsockname()[1]}/0"
        (finding,) = call("doctor", "--json", "--broker-url", url, code=1).json["findings"]
    assert (finding["check"], finding["level"]) == ("connection", "wrong")
    assert "did not answer in time" in finding["what"]


def test_keys_of_strangers_are_named_and_the_rest_is_examined(stage: Stage) -> None:
    for key in ("rolloutbus:{a b}:routes", b"rolloutbus:{\xff}:routes"):
        stage.redis.set(key, "1", ex=3600)
    stage.redis.hset(stage.keys.instance("math/7"), mapping={"pid": "x"})
    findings = call("doctor", "--json", code=1).json["findings"]
    tags = next(finding for finding in findings if finding["check"] == "hash tags")
    assert "{a b}" in tags["what"]
    assert "{\ufffd}" in tags["what"]
    assert [f for f in findings if f["check"] == f"run {RUN}" and "instance:math/7: pid 'x'" in f["what"]]

"""Settings: what is wrong is named by its path, and a secret stays one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from rolloutbus.broker.errors import ConfigError
from rolloutbus.broker.settings import BrokerSettings, broker_url, redacted, settings_from


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    broker: BrokerSettings = BrokerSettings()


def wrong(values: Any, model: type[BaseModel] = BrokerSettings, where: str = "rolloutbus.broker") -> str:
    with pytest.raises(ConfigError) as caught:
        settings_from(model, values, where)
    return str(caught.value)


def test_the_defaults_hold_together():
    chosen = BrokerSettings()
    assert (chosen.lease_ms, chosen.abandon_ms, chosen.key_ttl_ms) == (30_000, 600_000, 7_200_000)
    assert chosen.renew_every_s * 1000 < chosen.instance_ttl_ms <= chosen.lease_ms


@pytest.mark.parametrize(("lease_s", "renew_every_s"), [(30, 1), (30, 29), (2, 1), (0.2, 0.1), (600, 1)])
def test_an_instance_shows_signs_of_life_before_its_record_expires(lease_s: float, renew_every_s: float):
    chosen = BrokerSettings(lease_s=lease_s, renew_every_s=renew_every_s)
    assert renew_every_s * 1000 < chosen.instance_ttl_ms <= chosen.lease_ms


def test_an_unknown_key_is_named_with_its_path_and_the_known_ones():
    message = wrong({"lease": 3})
    assert message.startswith(
        "rolloutbus.broker.lease is not a known key (did you mean 'lease_s'?); known here: abandon_"
    )
    assert "lease_s" in message


def test_an_unknown_key_deeper_down_is_named_with_its_whole_path():
    message = wrong({"broker": {"lease": 3}}, Outer, "rolloutbus")
    assert message.startswith(
        "rolloutbus.broker.lease is not a known key (did you mean 'lease_s'?); known here: abandon_"
    )


def test_every_wrong_value_is_told():
    lines = wrong({"lease_s": 0, "block_s": "soon", "max_queued_bytes": -1}).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"rolloutbus.broker.{name}" for name in ("block_s", "lease_s", "max_queued_bytes")
    ]
    assert "but is 'soon'" in lines[0]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_times_are_finite(value: float):
    assert "rolloutbus.broker.lease_s" in wrong({"lease_s": value})


def test_a_lease_must_be_longer_than_the_pause_between_renewals():
    message = wrong({"lease_s": 1, "renew_every_s": 1})
    assert message == "rolloutbus.broker: renew_every_s (1) must be shorter than lease_s (1), or every lease runs out"


def test_keys_must_outlive_the_patience_with_an_absent_owner():
    assert "key_ttl_s (60) must be longer than abandon_after_s (600)" in wrong({"key_ttl_s": 60})


@pytest.mark.parametrize(
    "values",
    [
        {"url": ["redis://:s3cret@host"]},
        {"url": "redis://:s3cret@host", "lease_s": 1, "renew_every_s": 2},
        ["redis://:s3cret@host"],
    ],
)
def test_no_message_carries_the_password(values: Any):
    assert "s3cret" not in wrong(values)


def test_settings_do_not_print_their_address():
    assert "s3cret" not in repr(BrokerSettings(url="redis://:s3cret@host"))


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        BrokerSettings().lease_s = 3  # pyright: ignore


def test_the_given_address_goes_before_the_environments():
    environ = {"REDIS_URL": "redis://env"}
    assert broker_url("redis://given", environ) == "redis://given"
    assert broker_url(None, environ) == "redis://env"
    assert broker_url(None, {"REDIS_URL": ""}) is None
    assert broker_url(None, {}) is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://user:pw@host/1?db=2", "redis://user:***@host/1?db=2"),
        ("rediss://user:p:w@host", "rediss://user:***@host"),
        ("redis://:p/w@host", "redis://:***@host"),
        ("redis://:p@w@host", "redis://:***@host"),
        ("redis://:pw@host:port", "redis://:***@host:port"),
        ("redis://:pw@[::1]:1/0", "redis://:***@[::1]:1/0"),
        ("unix://:pw@/tmp/sock?db=1", "unix://:***@/tmp/sock?db=1"),
        ("unix:///tmp/sock?password=pw&db=1", "unix:///tmp/sock?password=***&db=1"),
        ("redis://:pw@host?password=other", "redis://:***@host?password=***"),
        ("the broker", "the broker"),
        ("redis://pw@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://p@w@host", "rediss://***@host"),
        ("redis://p/w@host", "redis://***@host"),
        ("user:pw@host:6379", "user:***@host:6379"),
        ("pw@host", "***@host"),
        ("redis://host/0?password=a@b", "redis://host/0?password=***"),
        ("unix:///tmp/a@b.sock", "unix:///tmp/a@b.sock"),
        ("unix://pw@/tmp/sock", "unix://***@/tmp/sock"),
        ("redis+tls://u:pw@h", "redis+tls://u:***@h"),
        (" redis://u:pw@h", " redis://u:***@h"),
        ("REDIS_URL=redis://u:pw@h", "REDIS_URL=redis://u:***@h"),
        ("redis://u/x:pw@h", "redis://***@h"),
        ("redis://a@b:pw@h", "redis://***@h"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str):
    assert redacted(url) == shown

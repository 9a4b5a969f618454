"""Port ranges: what one may be, and that no two instances on one node share a port."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rolloutbus.shard_workers.plan import (
    MIN_PORTS_PER_REPLICA,
    ShardConfigError,
    ShardSpec,
    check_ports,
    replica_port_range,
)

from tests.shard_workers.plan_configs import parsed, refusal, two_shards, with_second_shard


def packed(*ranges: tuple[int, int] | None, replicas: int = 1, strategy: str = "PACK") -> dict[str, Any]:
    config = two_shards(placement_strategy=strategy)
    for item, ports in zip(config["shards"], ranges, strict=True):
        if ports:
            item |= {"port_range_low": ports[0], "port_range_high": ports[1]}
    config["shards"][0]["replicas"] = replicas
    return config


@pytest.mark.parametrize("key", ["port_range_low", "port_range_high"])
def test_one_end_of_a_range_alone_is_refused(key: str):
    other = "port_range_high" if key == "port_range_low" else "port_range_low"
    message = refusal(with_second_shard(**{key: 5000}))
    assert f"`env.nemo_gym.shards[1]` (shard 'code') has {key} but no {other}" in message


@pytest.mark.parametrize("key", ["port_range_low", "port_range_high"])
@pytest.mark.parametrize("value", [0, -1, 65537, True, 5000.0, "5000"])
def test_ends_must_be_integers_within_bounds(key: str, value: object):
    ports: dict[str, object] = {"port_range_low": 5000, "port_range_high": 5001, key: value}
    message = refusal(with_second_shard(**ports))
    assert f"`env.nemo_gym.shards[1].{key}` (shard 'code') must be an integer from 1 to 65536" in message


@pytest.mark.parametrize(("low", "high"), [(5000, 5000), (5001, 5000)])
def test_low_must_be_below_high(low: int, high: int):
    assert "low must be below high" in refusal(with_second_shard(port_range_low=low, port_range_high=high))


def test_the_widest_range_is_taken():
    code = parsed(with_second_shard(port_range_low=1, port_range_high=65536)).shards[1]
    assert (code.port_range_low, code.port_range_high) == (1, 65536)


def test_strict_spread_needs_no_ranges_and_lets_them_overlap():
    assert parsed(packed(None, None, replicas=3, strategy="STRICT_SPREAD")).total_instances == 4
    assert parsed(packed((5000, 5001), (5000, 5001), replicas=3, strategy="STRICT_SPREAD")).total_instances == 4


@pytest.mark.parametrize("strategy", ["SPREAD", "STRICT_PACK", "PACK"])
def test_shared_nodes_need_a_range_for_every_shard(strategy: str):
    message = refusal(packed((5000, 6000), None, strategy=strategy))
    assert message.startswith("`env.nemo_gym.shards[1]` (shard 'code') needs `port_range_low`")
    assert strategy in message
    assert "STRICT_SPREAD" in message


@pytest.mark.parametrize("strategy", ["SPREAD", "STRICT_PACK", "PACK"])
def test_overlapping_ranges_on_shared_nodes_are_refused(strategy: str):
    message = refusal(packed((5000, 6000), (5999, 7000), strategy=strategy))
    assert "(shard 'math') has the ports 5000 to 5999" in message
    assert "(shard 'code') has 5999 to 6999" in message
    assert "both hold 5999," in message


def test_ranges_that_only_touch_are_taken():
    assert parsed(packed((5000, 6000), (6000, 7000))).placement_strategy == "PACK"


def test_replicas_on_a_shared_node_get_disjoint_slices():
    math = parsed(packed((5000, 5100), (6000, 7000), replicas=3)).shards[0]
    assert [replica_port_range(math, index) for index in range(3)] == [(5000, 5033), (5033, 5066), (5066, 5100)]


def test_a_range_too_small_for_its_replicas_is_refused_with_the_width_needed():
    width = 2 * MIN_PORTS_PER_REPLICA
    assert parsed(packed((5000, 5000 + width), (6000, 7000), replicas=2)).total_instances == 3
    message = refusal(packed((5000, 5000 + width - 1), (6000, 7000), replicas=2))
    assert f"(shard 'math') has 2 replicas and {width - 1} ports" in message
    assert f"widen the range to {width} ports or lower `replicas`" in message


def test_one_replica_may_have_a_range_of_any_width():
    assert parsed(packed((5000, 5001), (5001, 5002))).total_instances == 2


def test_a_shard_without_a_range_has_no_slices():
    assert replica_port_range(ShardSpec(name="math", config_paths=["m"], replicas=2), 1) is None


def test_a_range_too_narrow_to_cut_is_given_whole():
    spec = ShardSpec(name="math", config_paths=["m"], replicas=2, port_range_low=10, port_range_high=12)
    assert replica_port_range(spec, 1) == (10, 12)


@pytest.mark.parametrize("strategy", ["SPREAD", "STRICT_PACK", "PACK"])
def test_on_shared_nodes_no_range_is_given_whole_to_several(strategy: str):
    spec = ShardSpec(name="math", config_paths=["m"], replicas=2, port_range_low=10, port_range_high=12)
    with pytest.raises(ShardConfigError, match=r"shard 'math' has 2 replicas and 2 ports .* widen the range to 20"):
        replica_port_range(spec, 1, strategy)
    assert replica_port_range(dataclasses.replace(spec, replicas=1), 0, strategy) == (10, 12)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_replica_that_the_shard_does_not_have_is_refused(index: int):
    spec = ShardSpec(name="math", config_paths=["m"], replicas=2)
    with pytest.raises(ShardConfigError, match="shard 'math' has no replica"):
        replica_port_range(spec, index)


@given(low=st.integers(1, 65000), width=st.integers(1, 2000), replicas=st.integers(1, 40))
def test_slices_of_an_accepted_shard_are_wide_enough_and_cover_its_range_once(low: int, width: int, replicas: int):
    high = min(low + width, 65536)
    spec = ShardSpec(name="math", config_paths=["m"], replicas=replicas, port_range_low=low, port_range_high=high)
    try:
        check_ports([spec], "PACK")
    except ShardConfigError:
        assume(False)
    slices = [replica_port_range(spec, index) for index in range(replicas)]
    ports = [port for ports in slices if ports for port in range(*ports)]
    assert ports == list(range(low, high))
    assert replicas == 1 or all(ports and ports[1] - ports[0] >= MIN_PORTS_PER_REPLICA for ports in slices)


def test_a_scaled_shard_can_be_checked_again():
    plan = parsed(packed((5000, 5015), (6000, 7000)))
    scaled = [dataclasses.replace(plan.shards[0], replicas=2), plan.shards[1]]
    with pytest.raises(ShardConfigError, match="2 replicas and 15 ports"):
        check_ports(scaled, plan.placement_strategy)

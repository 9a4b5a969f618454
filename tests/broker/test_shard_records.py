"""A shard's record: what is missing has a default, what is none of ours is no record."""

from __future__ import annotations

import pytest
from rolloutbus.broker.shard_records import ShardRecord, instance_labels, parse_record


def test_the_only_replica_bears_the_shards_name_and_several_are_numbered():
    assert instance_labels("math", 1) == ["math"]
    assert instance_labels("math", 3) == ["math/0", "math/1", "math/2"]
    assert instance_labels("math", 0) == []


def test_named_instances_go_before_counted_ones():
    assert ShardRecord(replicas=2, labels=["math/0", "math/7"]).instances("math") == ["math/0", "math/7"]
    assert ShardRecord(replicas=2).instances("math") == ["math/0", "math/1"]


def test_a_record_survives_the_broker():
    record = ShardRecord(
        replicas=2, slots=8, commit="group", rerun="missing", group_timeout_s=5.5, entries={"a": ["agents"]}
    )
    assert parse_record(record.model_dump_json().encode()) == record


def test_what_a_newer_version_adds_is_ignored():
    assert parse_record(b'{"replicas": 2, "colour": "blue"}') == ShardRecord(replicas=2)


@pytest.mark.parametrize(
    "raw", [None, b"", b"{", b"null", b"[]", b'{"replicas": -1}', b'{"commit": "sometimes"}', b"\xff"]
)
def test_what_is_none_of_ours_is_no_record(raw: bytes | None):
    assert parse_record(raw) is None

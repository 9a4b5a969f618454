"""Overlay ownership: every inherited entry has exactly one owner, or the plan is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.shard_workers.plan_configs import Form, either_form, parsed, refusal, shard, two_shards, with_second_shard


@either_form
def test_a_single_shard_takes_all_that_is_unclaimed(form: Form):
    config: dict[str, Any] = {"a": {}, "b": {}, "c": {}, "shards": [shard("one", inherited_overlays=["a"], replicas=2)]}
    plan = parsed(form(config | {"common_inherited_overlays": ["c"]}))
    assert plan.shards[0].inherited_overlays == {"a", "b"}
    assert plan.common_inherited_overlays == {"c"}


@either_form
def test_an_unclaimed_entry_among_several_shards_prints_the_whole_inventory(form: Form):
    message = refusal(form(two_shards(stray={"x": 1})))
    assert "no shard claims: 'stray'" in message
    assert "common_inherited_overlays` if every shard needs it" in message
    for line in (
        "code: `env.nemo_gym.shards[1].inherited_overlays` (shard 'code')",
        "judge: `env.nemo_gym.common_inherited_overlays`",
        "math: `env.nemo_gym.shards[0].inherited_overlays` (shard 'math')",
        "stray: nobody",
    ):
        assert f"\n    {line}" in message


def test_an_unclaimed_entry_that_is_nearly_a_sharding_key_is_recognised():
    assert "did you mean 'common_overrides'?" in refusal(two_shards(common_override={"x": 1}))


def test_a_claim_of_what_does_not_exist_names_what_does():
    message = refusal(with_second_shard(inherited_overlays=["code", "cod"]))
    assert "`env.nemo_gym.shards[1].inherited_overlays` (shard 'code') claims 'cod'" in message
    assert "did you mean 'code'?" in message
    assert "'code', 'judge', 'math'" in message


@pytest.mark.parametrize("key", ["policy_model_name", "blank"])
def test_a_claim_of_something_that_is_no_mapping_says_so(key: str):
    message = refusal(with_second_shard(inherited_overlays=["code", key]) | {"blank": None})
    assert f"claims {key!r}, whose value is no mapping" in message


@pytest.mark.parametrize("key", ["shards", "common_overrides", "effort_levels"])
def test_a_claim_of_a_setting_says_so(key: str):
    config = with_second_shard(inherited_overlays=["code", key])
    config |= {"common_overrides": {}, "effort_levels": {}}
    assert f"claims {key!r}, which is a setting and no Gym entry" in refusal(config)


def test_a_second_claim_by_a_shard_names_both_owners():
    message = refusal(with_second_shard(inherited_overlays=["code", "math"]))
    assert "`env.nemo_gym.math` is claimed twice" in message
    assert "`env.nemo_gym.shards[0].inherited_overlays` (shard 'math')" in message
    assert "`env.nemo_gym.shards[1].inherited_overlays` (shard 'code')" in message


def test_a_claim_of_a_common_entry_names_both_owners():
    message = refusal(with_second_shard(inherited_overlays=["code", "judge"]))
    assert "by `env.nemo_gym.common_inherited_overlays` and by `env.nemo_gym.shards[1]" in message


def test_claims_of_a_single_shard_are_checked_too():
    config: dict[str, Any] = {
        "a": {},
        "shards": [shard("one", inherited_overlays=["a", "gone"])],
        "common_inherited_overlays": ["a"],
    }
    message = refusal(config)
    assert "claims 'gone'" in message
    assert "`env.nemo_gym.a` is claimed twice" in message


def test_trainer_settings_and_scalars_need_no_owner():
    config = two_shards(effort_levels={"high": 1}, tokenizer_config={"x": 1}, some_list=[{"a": 1}], none=None)
    assert parsed(config).shards == parsed(two_shards()).shards

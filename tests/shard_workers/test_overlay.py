"""`apply_shard_overlay` and `apply_shard_log_dir`: what an instance's stack is started with."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rolloutbus.shard_workers.overlay import apply_shard_log_dir, apply_shard_overlay
from rolloutbus.shard_workers.plan import SHARDING_CONFIG_KEYS, ShardConfigError, ShardPlan, ShardSpec

from tests.shard_workers.plan_configs import Form, either_form, parsed, shard, two_shards, with_second_shard


def overlaid(config: dict[str, Any], index: int = 0, form: Form | None = None) -> dict[str, Any]:
    given = form(config) if form else config
    plan = parsed(given)
    return apply_shard_overlay(given, plan, plan.shards[index])


@either_form
def test_a_shard_gets_shared_settings_common_entries_its_own_and_its_paths(form: Form):
    config = two_shards(tags=["a", {"b": 1}], blank=None, config_paths=None)
    assert overlaid(config, 0, form) == {
        "policy_model_name": "policy",
        "tags": ["a", {"b": 1}],
        "math": {"server": {"timeout": 1}},
        "judge": {"model": {"url": "http://judge"}},
        "config_paths": ["math.yaml"],
    }


@either_form
def test_later_layers_win_and_mappings_merge_deeply(form: Form):
    config = with_second_shard(overrides={"code": {"server": {"timeout": 9}}, "judge": {"model": {"key": "k"}}})
    config["common_overrides"] = {
        "code": {"server": {"timeout": 5, "workers": 4}},
        "judge": {"model": {"url": "http://common"}},
        "policy_model_name": "common",
    }
    result = overlaid(config, 1, form)
    assert result["code"] == {"server": {"timeout": 9, "workers": 4}}
    assert result["judge"] == {"model": {"url": "http://common", "key": "k"}}
    assert result["policy_model_name"] == "common"


@pytest.mark.parametrize(("old", "new"), [([1, 2], [3]), ({"a": 1}, 5), (5, {"a": 1}), ({"a": 1}, [1])])
def test_all_but_two_mappings_is_replaced(old: object, new: object):
    config = two_shards(common_overrides={"math": {"value": new}}, math={"value": old})
    assert overlaid(config)["math"] == {"value": new}


def test_overrides_may_add_entries():
    assert overlaid(with_second_shard(overrides={"fresh": {"a": 1}}), 1)["fresh"] == {"a": 1}


def test_top_level_nulls_are_dropped_from_every_layer_and_inner_ones_kept():
    config = two_shards(key=None, secret="s", common_overrides={"judge": None}, math={"inner": None})
    config["shards"][0]["overrides"] = {"secret": None}
    assert overlaid(config) == {"policy_model_name": "policy", "math": {"inner": None}, "config_paths": ["math.yaml"]}


def test_sharding_keys_never_reach_gym():
    config = two_shards(common_overrides={}, allowed_duplicate_entries=["x"], placement_strategy="STRICT_SPREAD")
    assert not SHARDING_CONFIG_KEYS & overlaid(config).keys()
    plan = dataclasses.replace(parsed(config), common_overrides={"placement_strategy": "PACK"})
    assert not SHARDING_CONFIG_KEYS & apply_shard_overlay(config, plan, plan.shards[0]).keys()


def test_mappings_of_the_trainer_are_not_taken_for_servers_by_gym():
    assert overlaid(two_shards(effort_levels={"a": 1}, tokenizer_config={"b": 1})) == overlaid(two_shards())


def test_the_shards_port_range_replaces_the_global_one_where_it_has_one():
    config = with_second_shard(port_range_low=7000, port_range_high=8000)
    config |= {"port_range_low": 1000, "port_range_high": 2000}
    assert (overlaid(config, 0)["port_range_low"], overlaid(config, 0)["port_range_high"]) == (1000, 2000)
    assert (overlaid(config, 1)["port_range_low"], overlaid(config, 1)["port_range_high"]) == (7000, 8000)


def test_config_paths_are_the_shards_whatever_a_layer_says():
    spec = ShardSpec(name="a", config_paths=["mine"], overrides={"config_paths": ["other"]})
    plan = ShardPlan([spec], frozenset(), {"config_paths": ["common"]}, frozenset(), "STRICT_SPREAD")
    assert apply_shard_overlay({"config_paths": ["base"]}, plan, spec) == {"config_paths": ["mine"]}


def test_inputs_are_not_changed_and_share_nothing_with_the_result():
    config = with_second_shard(overrides={"code": {"list": [1]}}) | {"common_overrides": {"judge": {"extra": [1]}}}
    plan = parsed(config)
    before = copy.deepcopy((config, plan))
    result = apply_shard_overlay(config, plan, plan.shards[1])
    result["code"]["list"].append(2)
    result["judge"]["extra"].append(2)
    result["judge"]["model"]["url"] = "changed"
    result["config_paths"].append("more")
    assert (config, plan) == before


@either_form
def test_what_is_kept_is_resolved_and_what_is_dropped_need_not_resolve(form: Form):
    config = two_shards(code={"url": "${gone}"}, math={"name": "${...policy_model_name}", "raw": r"\${later}"})
    config["math"]["name"] = "${..policy_model_name}"
    assert overlaid(config, 0, form)["math"] == {"name": "policy", "raw": "${later}"}
    with pytest.raises(ShardConfigError, match=r"`env\.nemo_gym\.code\.url` has an interpolation"):
        overlaid(config, 1, form)


@either_form
def test_a_value_that_nobody_has_given_yet_stays_open_and_an_override_gives_it(form: Form):
    config = two_shards(policy_base_url="???", math={"key": "???"}, code={"key": "???"})
    config["shards"][1]["overrides"] = {"code": {"key": "given"}}
    assert overlaid(config, 0, form)["math"] == {"key": "???"}
    assert overlaid(config, 0, form)["policy_base_url"] == "???"
    assert overlaid(config, 1, form)["code"] == {"key": "given"}


def test_an_override_meant_for_gyms_own_interpolation_is_not_resolved_twice():
    assert overlaid(with_second_shard(overrides={"url": r"\${policy_base_url}"}), 1)["url"] == "${policy_base_url}"


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_log_folders_are_per_shard_and_per_replica(make: Any):
    config = make({"nemo_gym_log_dir": "/logs", "a": {"b": 1}})
    assert apply_shard_log_dir(config, "math") == {"nemo_gym_log_dir": "/logs/math", "a": {"b": 1}}
    assert apply_shard_log_dir(config, "math", replica_index=0)["nemo_gym_log_dir"] == "/logs/math/0"
    assert config["nemo_gym_log_dir"] == "/logs"


@pytest.mark.parametrize("log_dir", ["/logs/", Path("/logs")])
def test_log_dirs_may_be_paths_and_end_with_a_slash(log_dir: object):
    config = {"nemo_gym_log_dir": log_dir}
    assert apply_shard_log_dir(config, "math", replica_index=12) == {"nemo_gym_log_dir": "/logs/math/12"}


@pytest.mark.parametrize("name", ["a/b", "a\\b"])
def test_slashes_in_a_name_open_no_folders(name: str):
    assert apply_shard_log_dir({"nemo_gym_log_dir": "/logs"}, name)["nemo_gym_log_dir"] == "/logs/a_b"


@pytest.mark.parametrize("config", [{"a": {"b": [1]}}, {"nemo_gym_log_dir": None}, {"nemo_gym_log_dir": ""}, {}])
def test_without_a_log_dir_an_equal_new_dict_comes_back(config: dict[str, Any]):
    result = apply_shard_log_dir(config, "math", replica_index=1)
    assert result == config
    assert result is not config


def test_the_log_dir_of_an_omegaconf_node_is_resolved():
    config = OmegaConf.create({"env": {"nemo_gym": {"nemo_gym_log_dir": "${root}/gym"}}, "root": "/r"})
    assert apply_shard_log_dir(config.env.nemo_gym, "math") == {"nemo_gym_log_dir": "/r/gym/math"}


def test_plain_text_for_gym_passes_the_log_dir_step_unread():
    config = {"nemo_gym_log_dir": "/logs", "url": "${policy_base_url}"}
    assert apply_shard_log_dir(config, "math")["url"] == "${policy_base_url}"


@pytest.mark.parametrize("log_dir", [3, ["/logs"], True, "???"])
def test_a_log_dir_that_is_no_path_is_refused(log_dir: object):
    with pytest.raises(ShardConfigError, match=r"`env\.nemo_gym\.nemo_gym_log_dir` must be the path of a folder"):
        apply_shard_log_dir({"nemo_gym_log_dir": log_dir}, "math")


def test_one_shard_plan_keeps_everything():
    config = {"a": {"x": 1}, "b": {"y": 2}, "shards": [shard("one")]}
    assert overlaid(config) == {"a": {"x": 1}, "b": {"y": 2}, "config_paths": ["one.yaml"]}

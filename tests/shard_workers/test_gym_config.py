"""`find_gym_config_entries`: what counts as an inherited entry, in either form of a config."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import OmegaConf
from rolloutbus.shard_workers.gym_config import find_gym_config_entries, plain_copy
from rolloutbus.shard_workers.plan import NEMO_RL_DICT_CONFIG_KEYS, SHARDING_CONFIG_KEYS, ShardConfigError

from tests.shard_workers.plan_configs import Form, either_form


@either_form
def test_entries_are_the_sorted_top_level_mappings(form: Form):
    config: dict[str, Any] = {"b": {"x": 1}, "a": {}, "scalar": 1, "text": "t", "list": [{"x": 1}], "null": None}
    assert find_gym_config_entries(form(config)) == ["a", "b"]


@either_form
def test_keys_of_the_plan_and_the_trainer_are_no_entries(form: Form):
    reserved = {key: {"x": 1} for key in SHARDING_CONFIG_KEYS | NEMO_RL_DICT_CONFIG_KEYS}
    assert find_gym_config_entries(form({**reserved, "a": {}})) == ["a"]


@either_form
def test_values_that_are_missing_or_do_not_resolve_are_no_entries_and_no_error(form: Form):
    config = {"a": {"url": "${gone}"}, "lost": "${gone}", "open": "???", "env_url": "${oc.env:ROLLOUTBUS_NOT_SET}"}
    assert find_gym_config_entries(form(config)) == ["a"]


def test_an_interpolation_of_a_mapping_is_an_entry_in_either_form():
    config = {"a": {"x": 1}, "alias": "${a}", "text": "${a.x}"}
    assert find_gym_config_entries(config) == ["a", "alias"]
    assert find_gym_config_entries(OmegaConf.create(config)) == ["a", "alias"]


def test_a_plain_config_may_mix_kinds_of_mappings():
    config = {"a": OmegaConf.create({"x": 1}), "b": MappingProxyType({"x": 1})}
    assert find_gym_config_entries(config) == ["a", "b"]


def test_keys_that_are_no_strings_are_refused():
    config: Any = {"a": {}, 3: {}}
    with pytest.raises(ShardConfigError, match=r"`env\.nemo_gym` has the key 3"):
        find_gym_config_entries(config)


def test_broken_text_elsewhere_does_not_hide_entries():
    assert find_gym_config_entries({"a": {"prompt": "${"}, "b": "${"}) == ["a"]


def test_plain_copy_shares_no_container_and_says_what_does_not_resolve():
    leaf = object()
    original: dict[str, Any] = {"a": [{"b": (1, leaf)}]}
    copied = plain_copy(original)
    assert copied == {"a": [{"b": [1, leaf]}]}
    copied["a"][0]["c"] = 1
    assert original == {"a": [{"b": (1, leaf)}]}
    with pytest.raises(ShardConfigError, match=r"`x`.*Interpolation key 'gone' not found"):
        plain_copy({"deep": OmegaConf.create({"x": "${gone}"})})

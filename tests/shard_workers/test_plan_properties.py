"""Laws of the plan over generated configs."""

from __future__ import annotations

import copy
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rolloutbus.shard_workers.overlay import apply_shard_overlay
from rolloutbus.shard_workers.plan import ShardPlan, ShardSpec, find_gym_config_entries

from tests.shard_workers.plan_configs import parsed, shard

keys = st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "text", "x y"])
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))
trees = st.dictionaries(keys, values, max_size=4)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid sharded config: up to three shards, whose claims divide the entries between them."""
    shards = [shard(name, inherited_overlays=[], overrides=draw(trees)) for name in ("a", "b", "c")]
    shards = shards[: draw(st.integers(1, 3))]
    common: list[str] = []
    base = draw(trees)
    for entry in find_gym_config_entries(base):
        draw(st.sampled_from([common, *(item["inherited_overlays"] for item in shards)])).append(entry)
    return {**base, "shards": shards, "common_inherited_overlays": common, "common_overrides": draw(trees)}


@given(config=configs())
def test_plain_and_omegaconf_input_give_the_same_plan_and_overlays(config: dict[str, Any]):
    node = OmegaConf.create({"env": {"nemo_gym": config}}).env.nemo_gym
    plan = parsed(config)
    assert parsed(node) == plan
    assert find_gym_config_entries(node) == find_gym_config_entries(config)
    for spec in plan.shards:
        assert apply_shard_overlay(node, plan, spec) == apply_shard_overlay(config, plan, spec)


@given(config=configs())
def test_inputs_are_never_changed(config: dict[str, Any]):
    node = OmegaConf.create(config)
    before = copy.deepcopy((config, OmegaConf.to_container(node)))
    for given_config in (config, node):
        plan = parsed(given_config)
        plan_before = copy.deepcopy(plan)
        for spec in plan.shards:
            apply_shard_overlay(given_config, plan, spec)
        assert plan == plan_before
    assert (config, OmegaConf.to_container(node)) == before


@given(config=configs())
def test_every_inherited_entry_lands_in_exactly_the_shards_that_own_it(config: dict[str, Any]):
    for item in config["shards"]:
        item["overrides"] = {}
    config["common_overrides"] = {}
    plan = parsed(config)
    for entry in find_gym_config_entries(config):
        hosts = [spec.name for spec in plan.shards if entry in apply_shard_overlay(config, plan, spec)]
        common = entry in config["common_inherited_overlays"]
        owners = [item["name"] for item in config["shards"] if common or entry in item["inherited_overlays"]]
        assert hosts == owners


def overlay_of(base: dict[str, Any], common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    spec = ShardSpec(name="a", config_paths=["a"], inherited_overlays=frozenset(base), overrides=own)
    return apply_shard_overlay(base, ShardPlan([spec], frozenset(), common, frozenset(), "STRICT_SPREAD"), spec)


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        found |= (
            leaves(cast("dict[str, Any]", value), (*path, key)) if isinstance(value, dict) else {(*path, key): value}
        )
    return found


@given(base=trees, common=trees, own=trees)
def test_the_last_layer_wins_at_every_leaf(base: dict[str, Any], common: dict[str, Any], own: dict[str, Any]):
    result = leaves(overlay_of(base, common, own))
    expected = {path: leaf for path, leaf in leaves(own).items() if len(path) > 1 or leaf is not None}
    assert {path: result.get(path) for path in expected} == expected


@given(base=trees, own=trees)
def test_a_leaf_that_no_later_layer_touches_stays(base: dict[str, Any], own: dict[str, Any]):
    result = leaves(overlay_of(base, {}, own))
    touched = list(leaves(own))
    for path, leaf in leaves(base).items():
        if (len(path) == 1 and leaf is None) or any(path[: len(at)] == at or at[: len(path)] == path for at in touched):
            continue
        if not _holds(own, path):
            assert result[path] == leaf


def _holds(tree: Any, path: tuple[str, ...]) -> bool:
    """Whether a tree has anything at a path; a mapping without a leaf in it replaces a scalar too."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = cast("dict[str, Any]", tree)[key]
    return True


@given(base=trees, own=trees)
def test_applying_the_same_layer_twice_changes_nothing_more(base: dict[str, Any], own: dict[str, Any]):
    assert overlay_of(base, own, own) == overlay_of(base, {}, own)

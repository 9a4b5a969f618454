"""`parse_shard_plan`: what each key may hold, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from types import MappingProxyType
from typing import Any, cast

import pytest
from omegaconf import OmegaConf
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.shard_workers.plan import (
    DEFAULT_PLACEMENT_STRATEGY,
    DEFAULT_REPLICAS,
    GYM_LOG_DIR_KEY,
    GYM_ROUTABLE_KEYS,
    NEMO_RL_DICT_CONFIG_KEYS,
    SHARD_NAME_PATTERN,
    SHARD_SPEC_KEYS,
    SHARDING_CONFIG_KEYS,
    ShardConfigError,
    ShardPlan,
    ShardSetupError,
    ShardSpec,
    parse_shard_plan,
)

from tests.shard_workers.plan_configs import (
    Form,
    either_form,
    omegaconf_subtree,
    parsed,
    refusal,
    shard,
    two_shards,
    with_second_shard,
)


def test_constants_are_those_of_the_plan():
    assert {
        "shards",
        "common_inherited_overlays",
        "common_overrides",
        "allowed_duplicate_entries",
        "placement_strategy",
    } == SHARDING_CONFIG_KEYS
    assert {"effort_levels", "tokenizer_config"} == NEMO_RL_DICT_CONFIG_KEYS
    assert {"responses_api_agents", "resources_servers"} == GYM_ROUTABLE_KEYS
    assert {field.name for field in dataclasses.fields(ShardSpec)} == SHARD_SPEC_KEYS
    assert (DEFAULT_REPLICAS, GYM_LOG_DIR_KEY) == (1, "nemo_gym_log_dir")
    assert DEFAULT_PLACEMENT_STRATEGY == "STRICT_SPREAD"


def test_errors_belong_to_the_family_and_to_what_callers_catch():
    assert {RolloutBusError, ValueError} <= set(ShardConfigError.__mro__)
    assert {RolloutBusError, RuntimeError} <= set(ShardSetupError.__mro__)


@either_form
def test_a_full_plan_is_read_as_written(form: Form):
    config = two_shards(
        common_overrides={"judge": {"model": {"url": "http://other"}}},
        allowed_duplicate_entries=["engine"],
        placement_strategy="PACK",
    )
    config["shards"][0] |= {"replicas": 2, "actor_cpus": 4, "port_range_low": 1, "port_range_high": 30000}
    config["shards"][1] |= {
        "overrides": {"code": {"server": {"timeout": 9}}},
        "port_range_low": 30000,
        "port_range_high": 65536,
    }
    assert parsed(form(config)) == ShardPlan(
        shards=[
            ShardSpec(
                name="math",
                config_paths=["math.yaml"],
                inherited_overlays=frozenset({"math"}),
                replicas=2,
                actor_cpus=4.0,
                port_range_low=1,
                port_range_high=30000,
            ),
            ShardSpec(
                name="code",
                config_paths=["code.yaml"],
                inherited_overlays=frozenset({"code"}),
                overrides={"code": {"server": {"timeout": 9}}},
                port_range_low=30000,
                port_range_high=65536,
            ),
        ],
        common_inherited_overlays=frozenset({"judge"}),
        common_overrides={"judge": {"model": {"url": "http://other"}}},
        allowed_duplicate_entries=frozenset({"engine"}),
        placement_strategy="PACK",
    )


def test_total_instances_is_the_sum_of_replicas():
    assert parsed(with_second_shard(replicas=4)).total_instances == 5


def test_specs_are_frozen_and_pickle():
    plan = parsed(two_shards())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.shards[0].replicas = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.placement_strategy = "PACK"  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_spec_defaults():
    spec = ShardSpec(name="math", config_paths=["m.yaml"])
    assert dataclasses.asdict(spec) == {
        "name": "math",
        "config_paths": ["m.yaml"],
        "inherited_overlays": frozenset(),
        "overrides": {},
        "replicas": 1,
        "actor_cpus": None,
        "port_range_low": None,
        "port_range_high": None,
    }


@either_form
def test_plan_holds_plain_containers_only(form: Form):
    config = with_second_shard(overrides={"code": {"list": [{"a": 1}]}})
    plan = parsed(form(config | {"common_overrides": {"x": {"y": [1]}}}))
    parts: list[object] = [plan.shards, plan.common_overrides, plan.shards[1].overrides]
    parts += [cast("dict[str, Any]", plan.shards[1].overrides["code"])["list"], plan.common_overrides["x"]["y"]]
    assert [type(part) for part in parts] == [list, dict, dict, list, list]
    assert type(plan.shards[1].overrides["code"]["list"][0]) is dict


@either_form
def test_no_shards_key_is_the_unsharded_run_and_checks_nothing(form: Form):
    assert parse_shard_plan(form({"config_paths": 7, "placement_strategy": "NONSENSE", "math": {}})) is None


@pytest.mark.parametrize("shards", [None, [], {}, "math", {"math": {}}, 3])
@either_form
def test_shards_must_be_a_non_empty_list(form: Form, shards: object):
    message = refusal(form(two_shards(shards=shards)))
    assert message.startswith("`env.nemo_gym.shards` must be a list of at least one shard")
    assert "for an unsharded run delete the key" in message


@pytest.mark.parametrize("item", ["math", None, ["math"], 1])
def test_each_shard_must_be_a_mapping(item: object):
    assert refusal(two_shards(shards=[shard("a"), item])).startswith("`env.nemo_gym.shards[1]` must be a mapping")


@pytest.mark.parametrize("config", [None, 7, ["shards"], "shards"])
def test_the_config_itself_must_be_a_mapping(config: Any):
    assert "`env.nemo_gym` must be a mapping" in refusal(config)


@pytest.mark.parametrize("paths", [["m.yaml"], "m.yaml", []])
@either_form
def test_config_paths_beside_shards_are_refused(form: Form, paths: object):
    message = refusal(form(two_shards(config_paths=paths)))
    assert "`env.nemo_gym.config_paths` stands beside `shards`" in message
    assert "set this key to null" in message


@either_form
def test_null_config_paths_count_as_absent(form: Form):
    assert parsed(form(two_shards(config_paths=None))) == parsed(two_shards())


@either_form
def test_null_optional_settings_count_as_absent(form: Form):
    optional = SHARD_SPEC_KEYS - {"name", "config_paths", "inherited_overlays"}
    blanked = with_second_shard(**dict.fromkeys(optional)) | {
        "common_overrides": None,
        "allowed_duplicate_entries": None,
        "placement_strategy": None,
    }
    assert parsed(form(blanked)) == parsed(two_shards())


@pytest.mark.parametrize("key", ["name", "config_paths"])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_name_and_config_paths_are_required(key: str, how: str):
    config = two_shards()
    if how == "null":
        config["shards"][1][key] = None
    else:
        del config["shards"][1][key]
    assert f"`env.nemo_gym.shards[1].{key}`" in refusal(config)
    assert "is missing; every shard needs it" in refusal(config)


@pytest.mark.parametrize("name", ["math", "Math-2", "0", "a.b_c-d", "7b..x"])
def test_good_names_are_taken(name: str):
    assert SHARD_NAME_PATTERN.match(name)
    assert parsed(with_second_shard(name=f"{name}x")).shards[1].name == f"{name}x"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "-a", "_a", ".a", "a b", "a\n", "mäth", "٣"])
def test_names_that_are_no_safe_path_component_are_refused(name: str):
    assert not SHARD_NAME_PATTERN.match(name)
    message = refusal(with_second_shard(name=name))
    assert message.startswith("`env.nemo_gym.shards[1].name`")
    assert "letters, digits" in message


@pytest.mark.parametrize("name", [3, True, ["math"], 1.5])
def test_names_that_are_no_strings_are_refused(name: object):
    message = refusal(with_second_shard(name=name))
    assert message.startswith("`env.nemo_gym.shards[1].name` must be a string")


def test_repeated_names_are_refused_with_both_places():
    message = refusal(with_second_shard(name="math"))
    assert "`env.nemo_gym.shards[1].name` is 'math', as is shards[0]" in message


@pytest.mark.parametrize(
    ("paths", "place"),
    [("c.yaml", ""), ([], ""), ({"a": 1}, ""), (["a", ""], "[1]"), (["  "], "[0]"), ([None], "[0]"), ([1], "[0]")],
)
def test_config_paths_must_be_a_non_empty_list_of_non_empty_strings(paths: object, place: str):
    message = refusal(with_second_shard(config_paths=paths))
    assert message.startswith(f"`env.nemo_gym.shards[1].config_paths{place}` (shard 'code') ")


@pytest.mark.parametrize("replicas", [0, -1, True, False, 1.0, 1.5, "2", [1], float("nan")])
@either_form
def test_replicas_must_be_a_positive_integer(form: Form, replicas: object):
    assert refusal(form(with_second_shard(replicas=replicas))) == (
        f"`env.nemo_gym.shards[1].replicas` (shard 'code') must be an integer >= 1, but is {replicas!r}"
    )


@pytest.mark.parametrize("cpus", [0, -1, 0.0, -0.5, True, "8", float("nan"), float("inf"), float("-inf"), [8], 10**400])
def test_actor_cpus_must_be_positive_and_finite(cpus: object):
    message = refusal(with_second_shard(actor_cpus=cpus))
    assert message.startswith("`env.nemo_gym.shards[1].actor_cpus` (shard 'code') must be a ")
    assert "remove it for the default" in message


@pytest.mark.parametrize("cpus", [1, 0.5, 16])
def test_actor_cpus_are_read_as_float(cpus: float):
    actor_cpus = parsed(with_second_shard(actor_cpus=cpus)).shards[1].actor_cpus
    assert type(actor_cpus) is float
    assert actor_cpus == cpus


@pytest.mark.parametrize("key", ["inherited_overlays", "common_inherited_overlays", "allowed_duplicate_entries"])
@pytest.mark.parametrize("value", ["math", {"math": 1}, 3, [""], [None], [1], ["math", "math"]])
def test_lists_of_keys_are_lists_of_distinct_non_empty_strings(key: str, value: object):
    of_shard = key == "inherited_overlays"
    config = with_second_shard(**{key: value}) if of_shard else two_shards(**{key: value})
    path = f"env.nemo_gym.shards[1].{key}" if of_shard else f"env.nemo_gym.{key}"
    assert refusal(config).startswith(f"`{path}")


@pytest.mark.parametrize("value", [["x"], "x", 1, True])
def test_overrides_must_be_mappings(value: object):
    assert "`env.nemo_gym.shards[1].overrides`" in refusal(with_second_shard(overrides=value))
    assert "`env.nemo_gym.common_overrides`" in refusal(two_shards(common_overrides=value))


@pytest.mark.parametrize("key", sorted(SHARDING_CONFIG_KEYS))
def test_overrides_cannot_hold_sharding_keys(key: str):
    message = refusal(with_second_shard(overrides={key: {"a": 1}}))
    assert f"`env.nemo_gym.shards[1].overrides.{key}` (shard 'code')" in message
    assert f"move it up to `env.nemo_gym.{key}`" in message


def test_overrides_cannot_hold_config_paths():
    assert "shards[1].overrides.config_paths" in refusal(with_second_shard(overrides={"config_paths": ["x"]}))


def test_unknown_shard_keys_are_refused_with_the_way_to_overrides():
    message = refusal(with_second_shard(replica=2))
    assert "`env.nemo_gym.shards[1].replica` (shard 'code') is no setting of a shard" in message
    assert "did you mean 'replicas'?" in message
    assert "belongs under its `overrides`" in message


def test_shard_keys_that_are_no_strings_are_refused():
    config = two_shards()
    config["shards"][1][5] = 1
    assert "`env.nemo_gym.shards[1]" in refusal(config)
    assert "pydantic" not in refusal(config)


@pytest.mark.parametrize("strategy", ["STRICT_SPREAD", "SPREAD", "STRICT_PACK", "PACK"])
def test_known_placement_strategies_are_taken(strategy: str):
    config = two_shards(placement_strategy=strategy)
    for index, item in enumerate(config["shards"]):
        item |= {"port_range_low": 1000 * (index + 1), "port_range_high": 1000 * (index + 2)}
    assert parsed(config).placement_strategy == strategy


@pytest.mark.parametrize("strategy", ["pack", "NONE", "", 1, ["PACK"]])
def test_other_placement_strategies_are_refused(strategy: object):
    message = refusal(two_shards(placement_strategy=strategy))
    assert "must be one of STRICT_SPREAD, SPREAD, STRICT_PACK, PACK" in message


def test_every_mistake_is_told_at_once():
    config = with_second_shard(replicas=0, actor_cpus="x", foo=1)
    config["shards"][0]["name"] = ".."
    message = refusal(config)
    assert message.startswith("`env.nemo_gym` has 4 mistakes:")
    for path in ("shards[0].name", "shards[1].replicas", "shards[1].actor_cpus", "shards[1].foo"):
        assert f"`env.nemo_gym.{path}`" in message


@pytest.mark.parametrize(
    "config",
    [with_second_shard(replicas=0), with_second_shard(overrides={"a": "${gone}"}), two_shards(shards=[]), None],
)
def test_no_foreign_error_shows_through(config: Any):
    with pytest.raises(ShardConfigError) as caught:
        parse_shard_plan(config)
    printed = "".join(traceback.format_exception(caught.value))
    assert "pydantic" not in str(caught.value)
    assert "ValidationError" not in printed
    assert "omegaconf.errors" not in printed


@either_form
def test_interpolations_in_the_plan_are_resolved(form: Form):
    config = with_second_shard(
        replicas="${.spare}" if form is omegaconf_subtree else "${spare}", overrides={"literal": r"\${policy_base_url}"}
    )
    prefix = "env.nemo_gym." if form is omegaconf_subtree else ""
    config["shards"][1]["replicas"] = f"${{{prefix}spare}}"
    code = parsed(form(config | {"spare": 3})).shards[1]
    assert code.replicas == 3
    assert code.overrides == {"literal": "${policy_base_url}"}


@either_form
@pytest.mark.parametrize("text", ["${gone.x}", "${oc.env:ROLLOUTBUS_TEST_NOT_SET}", "${no_such_resolver:1}"])
def test_an_interpolation_that_does_not_resolve_is_named_by_key_and_shard(form: Form, text: str):
    message = refusal(form(with_second_shard(overrides={"code": {"urls": ["ok", text]}})))
    assert message.startswith("`env.nemo_gym.shards[1].overrides.code.urls[1]` (shard 'code') has an interpolation")
    assert r"`\${...}`" in message


def test_broken_interpolation_syntax_is_named_by_key():
    message = refusal(with_second_shard(overrides={"code": {"prompt": "costs ${"}}))
    assert message.startswith("`env.nemo_gym.shards[1].overrides.code.prompt`")


@either_form
def test_a_missing_value_in_the_plan_is_named_by_key_and_shard(form: Form):
    message = refusal(form(with_second_shard(actor_cpus="???")))
    assert message.startswith("`env.nemo_gym.shards[1].actor_cpus` (shard 'code') is '???'")


@either_form
def test_missing_shards_are_no_unsharded_run(form: Form):
    assert "`env.nemo_gym.shards` is '???'" in refusal(form(two_shards(shards="???")))


def test_an_interpolation_elsewhere_does_not_stop_the_plan():
    config = OmegaConf.create(two_shards(policy_base_url="${generation.url}", math={"url": "${generation.url}"}))
    assert [item.name for item in parsed(config).shards] == ["math", "code"]


def test_tuples_and_read_only_mappings_read_like_lists_and_dicts():
    config = two_shards()
    config["shards"] = tuple(MappingProxyType(item | {"config_paths": ("a",)}) for item in config["shards"])
    assert parsed(config).shards[0].config_paths == ["a"]


def test_a_plain_config_may_hold_omegaconf_nodes_and_python_objects():
    marker = object()
    config = with_second_shard(overrides={"code": {"callable": marker}})
    config["math"] = OmegaConf.create({"a": 1})
    plan = parsed(config)
    assert plan.shards[1].overrides["code"]["callable"] is marker
    assert plan.shards[0].inherited_overlays == {"math"}

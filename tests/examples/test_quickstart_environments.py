"""The quickstart's environments over the quickstart's own rows, without broker and without Ray."""

from __future__ import annotations

import json
import runpy
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rolloutbus.shard_workers.environments import Environment, load_environment
from rolloutbus.shard_workers.overlay import apply_shard_overlay
from rolloutbus.shard_workers.plan import parse_shard_plan

from examples.environments import is_valid_sentence, last_number, pair_order, rank_reward

ROOT = Path(__file__).parents[2]
GENERATIONS = 8

Row = dict[str, Any]


def prompts() -> list[Row]:
    return [json.loads(line) for line in (ROOT / "examples/rows.jsonl").read_text(encoding="utf-8").splitlines()]


async def start_shards(monkeypatch: pytest.MonkeyPatch) -> dict[str, Environment]:
    """`{route: the started environment of its shard}`, one instance per shard, from the quickstart's own plan."""
    monkeypatch.chdir(ROOT)
    config: Any = OmegaConf.to_container(OmegaConf.load("examples/quickstart.yaml"))
    gym = config["env"]["nemo_gym"]
    plan = parse_shard_plan(gym)
    assert plan is not None
    hosts: dict[str, Environment] = {}
    for shard in plan.shards:
        environment = load_environment(config["rolloutbus"]["environment"])
        await environment.start(apply_shard_overlay(gym, plan, shard))
        hosts |= dict.fromkeys(environment.list_entries(), environment)
    return hosts


async def run_quickstart(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Row, Row]]:
    """Every prompt, GENERATIONS times, on the environment that hosts its route."""
    hosts = await start_shards(monkeypatch)
    scored: list[tuple[Row, Row]] = []
    for number, prompt in enumerate(prompts()):
        group = [{**prompt, "_rowidx": number * GENERATIONS + place} for place in range(GENERATIONS)]
        async for row, outcome in hosts[prompt["agent_ref"]["name"]].run_rollouts(group):
            assert isinstance(outcome, dict), outcome
            scored.append((row, outcome))
    for environment in hosts.values():
        await environment.stop()
    return scored


def test_the_rows_are_what_their_program_writes() -> None:
    program = runpy.run_path(str(ROOT / "examples/make_rows.py"))
    assert prompts() == program["rows"]()


def test_there_are_enough_prompts_over_enough_routes_and_none_twice() -> None:
    routes = Counter(row["agent_ref"]["name"] for row in prompts())
    assert routes.keys() == {"arithmetic", "sort_words", "brevity"}
    assert sum(routes.values()) == 64
    assert min(routes.values()) >= 20
    texts = {json.dumps(row["responses_create_params"]) for row in prompts()}
    assert len(texts) == 64


def test_the_plan_is_valid_and_has_a_shard_with_two_replicas() -> None:
    config: Any = OmegaConf.load(ROOT / "examples/quickstart.yaml")
    plan = parse_shard_plan(config["env"]["nemo_gym"])
    assert plan is not None
    assert {shard.name: shard.replicas for shard in plan.shards} == {"words": 2, "math": 1}


async def test_the_offline_policy_is_right_often_but_not_always_on_every_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    correct: dict[str, list[bool]] = defaultdict(list)
    for row, result in await run_quickstart(monkeypatch):
        correct[row["agent_ref"]["name"]].append(result["correct"])
    shares = {route: sum(marks) / len(marks) for route, marks in correct.items()}
    assert len(shares) == 3
    assert all(0.4 < share < 0.95 for share in shares.values()), shares


async def test_results_carry_reward_and_response_and_rewards_vary_inside_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewards: dict[int, set[float]] = defaultdict(set)
    texts: dict[int, set[str]] = defaultdict(set)
    for row, result in await run_quickstart(monkeypatch):
        [item] = result["response"]["output"]
        assert (item["type"], item["role"]) == ("message", "assistant")
        assert type(result["reward"]) is float
        assert 0.0 <= result["reward"] <= 1.0
        rewards[row["_rowidx"] // GENERATIONS].add(result["reward"])
        texts[row["_rowidx"] // GENERATIONS].add(item["content"][0]["text"])
    assert len(rewards) == 64
    assert sum(len(values) > 1 for values in rewards.values()) > 48
    assert sum(len(values) > 1 for values in texts.values()) > 56


async def test_two_runs_give_the_same_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        {row["_rowidx"]: result for row, result in await run_quickstart(monkeypatch)},
        {row["_rowidx"]: result for row, result in await run_quickstart(monkeypatch)},
    ]
    assert len(runs[0]) == 64 * GENERATIONS
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 + 7 = 19. Answer: 19", 19.0),
        ("Answer: 3, no wait. Answer: -4.5", -4.5),
        ("It is 8 or 9", 9.0),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_the_last_answer_counts(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("The boat and the rope rest.", True),
        ("The Boat, the rope rest!", True),
        ("The boat rests. The rope too.", False),
        ("The boat rests.", False),
        ("The boats and ropes rest.", False),
        ("The boat and the rope rest", False),
        ("The boat and the rope rest there for ever.", False),
        ("", False),
    ],
)
def test_a_sentence_is_one_has_its_words_and_is_short(text: str, valid: bool) -> None:
    assert is_valid_sentence(text, ["boat", "rope"], max_words=7) is valid


def test_order_is_the_share_of_neighbours_that_stand_right() -> None:
    assert pair_order(["a", "b", "c"], ["a", "b", "c"]) == 1.0
    assert pair_order(["b", "a", "c"], ["a", "b", "c"]) == 0.5
    assert pair_order(["a"], ["a"]) == 1.0


def test_shorter_sentences_rank_higher_ties_share_and_invalid_ones_get_nothing() -> None:
    lengths = [5, 9, 5, None, 7]
    assert [rank_reward(length, lengths) for length in lengths] == [1.0, 0.25, 1.0, 0.0, 0.5]
    assert rank_reward(None, [None, None]) == 0.0

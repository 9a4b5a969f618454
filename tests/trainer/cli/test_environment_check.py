"""Entries that stand under an environment which they mean nothing to, told before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import call

FUNCTION = 'arithmetic: {function: "asyncio:sleep", tolerance: 0.1}\n'
GYM = "quiz: {responses_api_agents: {simple_agent: {entrypoint: app.py}}}\n"
SHARDS = "env: {nemo_gym: {shards: [{name: math, config_paths: [math.yaml]}]}}\n"
ROW = '{"responses_create_params": {"input": "1+1?"}, "agent_ref": {"name": "arithmetic"}}\n'

COMMANDS = [("check",), ("run", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl"), ("up",)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "math.yaml").write_text(FUNCTION)
    (tmp_path / "c.yaml").write_text(SHARDS)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_functions_under_nemo_gym_are_refused_with_the_remedy(command: tuple[str, ...]) -> None:
    """`check` called it sound, and `up` asked for NeMo Gym to be installed."""
    said = call(*command, "-c", "c.yaml", code=2)
    assert (
        "shard 'math': arithmetic names a function, and environment nemo_gym, which is the default, runs" in said.said
    )
    assert "say `rolloutbus.environment: functions` in the config" in said.said
    assert "NeMo Gym, which is not installed" not in said.said
    assert "broker:" not in said.err


def test_functions_in_the_main_config_are_refused_as_those_in_files(folder: Path) -> None:
    (folder / "c.yaml").write_text('env: {nemo_gym: {a: {function: "x:y"}, b: {function: "x:z"}}}')
    assert "shard 'nemo_gym': a, b name functions, and" in call("check", "-c", "c.yaml", code=2).said


@pytest.mark.parametrize("beside", ["math.yaml", "elsewhere.yaml", "broken.yaml"])
def test_where_gym_may_have_entries_too_functions_are_only_told(folder: Path, beside: str) -> None:
    """Beside them in the same file, in one that only Gym's package has, or in one that cannot be read here."""
    (folder / "math.yaml").write_text(FUNCTION + (GYM if beside == "math.yaml" else ""))
    (folder / "broken.yaml").write_text("a: [")
    paths = f"env.nemo_gym.shards[0].config_paths=[math.yaml,{beside}]"
    said = call("check", "-c", "c.yaml", paths).said
    assert "arithmetic names a function, and environment nemo_gym" in said
    assert "it needs a config of its own, with `rolloutbus.environment: functions`" in said


@pytest.mark.parametrize(
    "entry",
    [
        GYM,
        "quiz: {resources_servers: {mcqa: {function: 'x:y'}}}\n",
        "prompts: {function: of the prompt}\n",
        "quiz: {_inherit_from: other, grading: 1}\n",
    ],
)
def test_what_names_no_function_is_left_to_gym(folder: Path, entry: str) -> None:
    (folder / "math.yaml").write_text(entry)
    said = call("check", "-c", "c.yaml")
    assert "function" not in said.said
    assert "The config is sound." in said.out


def test_other_environments_may_read_entries_as_they_like() -> None:
    own = "rolloutbus.environment=rolloutbus.shard_workers.environments.functions:FunctionsEnvironment"
    assert "names a function" not in call("check", "-c", "c.yaml", own).said
    assert "names a function" not in call("check", "-c", "c.yaml", "rolloutbus.environment=actor_class").said


@pytest.mark.parametrize("command", COMMANDS)
def test_gyms_entries_under_functions_are_refused_with_the_remedy(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "math.yaml").write_text(GYM)
    said = call(*command, "-c", "c.yaml", "rolloutbus.environment=functions", code=2).said
    assert "shard 'math': no entry has a key 'function', and 'quiz' is an entry of NeMo Gym" in said
    assert "say `rolloutbus.environment: nemo_gym` for those" in said


def test_gyms_own_files_are_not_looked_for_under_functions_without_a_word() -> None:
    paths = "env.nemo_gym.shards[0].config_paths=[resources_servers/mcqa/configs/mcqa.yaml]"
    said = call("check", "-c", "c.yaml", paths, "rolloutbus.environment=functions", code=2).said
    assert "if it is NeMo Gym's own, say `rolloutbus.environment: nemo_gym`" in said
    said = call(
        "check",
        "-c",
        "c.yaml",
        "env.nemo_gym.shards[0].config_paths=[mth.yaml]",
        "rolloutbus.environment=functions",
        code=2,
    )
    assert "NeMo Gym" not in said.said


def test_ports_are_asked_for_with_a_word_about_those_who_need_none() -> None:
    """Who forgot the environment was asked for ports that functions never open."""
    said = call("check", "-c", "c.yaml", "env.nemo_gym.placement_strategy=PACK", code=2).said
    assert "need no ports under `rolloutbus.environment: functions`" in said


def test_check_says_that_gym_is_not_here_and_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "math.yaml").write_text(GYM)
    monkeypatch.setattr("importlib.util.find_spec", dict[str, object]().get)
    said = call("check", "-c", "c.yaml")
    assert "not checked, the machine that starts it must have it" in said.said
    assert "needs NeMo Gym, which is not installed here" in said.said
    assert "The config is sound." in said.out

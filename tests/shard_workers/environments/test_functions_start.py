"""What `start` reads, and what it says about a config it cannot use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.errors import ConfigError, EnvironmentContractError
from rolloutbus.shard_workers.environments.functions import FunctionsEnvironment
from rolloutbus.shard_workers.environments.offline import OfflinePolicy

SOURCE = """
class Judge:
    async def score(self, row, context):
        return {"reward": 1, "by": "a method"}

    async def __call__(self, row, context):
        return {"reward": 1, "by": "an object"}

async def answer(row, context):
    return {"reward": 1, "by": "a function"}

async def alone(row):
    return {}

def plain(row, context):
    return {}

judge = Judge()
number = 3
"""


async def started(config: Mapping[str, Any]) -> FunctionsEnvironment:
    environment = FunctionsEnvironment()
    await environment.start(config)
    return environment


def write_module(folder: Path, name: str, source: str = SOURCE) -> None:
    (folder / f"{name}.py").write_text(source, encoding="utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_entries_are_the_mappings_that_name_a_function(folder: Path) -> None:
    write_module(folder, "probe_entries")
    config = {
        "policy": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key": "k"},
        "first": {"function": "probe_entries:answer"},
        "second": {"function": "probe_entries:judge", "max_concurrency": 1},
        "third": {"function": "probe_entries:judge.score"},
        "effort_levels": {"low": 1},
        "port_range_low": 1,
    }
    environment = await started(config)
    types = ["responses_api_agents"]
    assert environment.list_entries() == {"first": types, "second": types, "third": types}
    rows = [{"_rowidx": place, "agent_ref": {"name": name}} for place, name in enumerate(["first", "second", "third"])]
    found = {row["_rowidx"]: result async for row, result in environment.run_rollouts(rows)}
    assert found == {
        0: {"reward": 1, "by": "a function"},
        1: {"reward": 1, "by": "an object"},
        2: {"reward": 1, "by": "a method"},
    }
    await environment.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_entry_in_a_config_file_is_overridden_by_the_shards_own(folder: Path) -> None:
    write_module(folder, "probe_merge")
    (folder / "shard.yaml").write_text("answer: {function: 'nowhere:else', tone: calm}\n", encoding="utf-8")
    config = {"config_paths": ["shard.yaml"], "answer": {"function": "probe_merge:answer"}}
    environment = await started(config)
    assert list(environment.list_entries()) == ["answer"]
    await environment.stop()


async def test_python_path_is_relative_to_the_config_files_folder(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "code").mkdir()
    write_module(folder / "code", "probe_python_path")
    config = {
        "config_dir": str(folder / "configs"),
        "python_path": ["../code"],
        "answer": {"function": "probe_python_path:answer"},
    }
    environment = await started(config)
    assert list(environment.list_entries()) == ["answer"]
    await environment.stop()


async def test_starting_twice_is_refused_and_a_stopped_one_starts_again(folder: Path) -> None:
    write_module(folder, "probe_twice")
    config = {"answer": {"function": "probe_twice:answer"}}
    environment = await started(config)
    with pytest.raises(EnvironmentContractError, match="stop it before"):
        await environment.start(config)
    await environment.stop()
    await environment.start(config)
    await environment.stop()


async def test_stop_closes_the_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(folder, "probe_policy")
    closed: list[object] = []

    async def aclose(policy: object) -> None:
        closed.append(policy)

    monkeypatch.setattr(OfflinePolicy, "aclose", aclose)
    environment = await started({"policy": "offline", "answer": {"function": "probe_policy:answer"}})
    await environment.stop()
    await environment.stop()
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_such_module:f", "answer.function: no_such_module:f: there is no module 'no_such_module'; looked in"),
        ("probe_wrong.inner:f", "there is no module 'probe_wrong.inner'; looked in"),
        ("probe_wrong:missing", "probe_wrong.py) has no attribute 'missing'"),
        ("probe_wrong:plain", "answer.function: probe_wrong:plain is no async function; define it as async def"),
        ("probe_wrong:Judge", "is no async function"),
        ("probe_wrong:number", "is no async function"),
        ("probe_wrong:alone", "cannot be called with (row, context): too many positional arguments"),
        ("probe_wrong", "'probe_wrong' is not of the form 'package.module:name'"),
        ("probe wrong:f", "is not of the form"),
        (3, "answer.function: 3 is not of the form"),
        (None, "answer.function: None is not of the form"),
    ],
)
async def test_a_function_that_cannot_be_used_is_named_with_its_entry(
    folder: Path, function: object, said: str
) -> None:
    write_module(folder, "probe_wrong")
    with pytest.raises(ConfigError) as raised:
        await started({"answer": {"function": function}})
    assert str(raised.value).startswith("answer.function: ")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("probe_needs_more", "import not_installed_here", "ModuleNotFoundError: No module named 'not_installed_here'"),
        ("probe_raises", "1 / 0", "ZeroDivisionError: division by zero"),
        ("probe_is_a_script", "raise SystemExit(2)", "SystemExit: 2"),
        ("probe_does_not_parse", "def f(:", "SyntaxError"),
    ],
)
async def test_a_module_that_does_not_import_says_why(folder: Path, name: str, source: str, said: str) -> None:
    write_module(folder, name, source)
    with pytest.raises(ConfigError) as raised:
        await started({"answer": {"function": f"{name}:f"}})
    assert f"importing module '{name}' failed with {said}" in str(raised.value)
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("limit", [0, -1, True, "8", 1.5])
async def test_a_limit_that_is_no_positive_integer_is_refused(folder: Path, limit: object) -> None:
    write_module(folder, "probe_limit")
    with pytest.raises(ConfigError, match=r"answer\.max_concurrency: .* is no integer of 1 or more"):
        await started({"answer": {"function": "probe_limit:answer", "max_concurrency": limit}})


async def test_a_config_without_any_function_names_the_mappings_it_saw() -> None:
    with pytest.raises(ConfigError, match=r"no entry has a key 'function' \(without it: answer\)"):
        await started({"answer": {"funktion": "a:b"}, "policy": {"model": "m"}})
    with pytest.raises(ConfigError, match=r"no entry has a key 'function'; name one"):
        await started({})


async def test_python_path_must_be_a_list() -> None:
    with pytest.raises(ConfigError, match="python_path: 'code' is no list of folders"):
        await started({"python_path": "code", "answer": {"function": "a:b"}})


async def test_a_start_that_fails_leaves_an_environment_that_is_not_started() -> None:
    environment = FunctionsEnvironment()
    with pytest.raises(ConfigError):
        await environment.start({})
    with pytest.raises(Exception, match="not started"):
        await environment.health()
    await environment.stop()

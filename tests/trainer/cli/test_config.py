"""Overrides, the order in which a broker is named, and rows that are expanded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rolloutbus.broker.errors import ConfigError, RowError
from rolloutbus.trainer.cli.config import configured_url, load_config, with_target
from rolloutbus.trainer.cli.rows import read_rows

from .conftest import call

CONFIG = """\
rolloutbus:
  broker: {url: "redis://from-config:1/0"}
env:
  nemo_gym:
    name: ${oc.env:SOMEBODY,nobody}
    shards: [{name: a, replicas: 1}, {name: b}]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rolloutbus.workers.slots=8", "rolloutbus.workers.slots", 8),
        ("+rolloutbus.workers.slots=8", "rolloutbus.workers.slots", 8),
        ("env.nemo_gym.shards[0].replicas=3", "env.nemo_gym.shards[0].replicas", 3),
        ("env.nemo_gym.new={a: [1, 2]}", "env.nemo_gym.new.a", [1, 2]),
        ("env.nemo_gym.text=a=b", "env.nemo_gym.text", "a=b"),
        ("env.nemo_gym.copy=${env.nemo_gym.name}", "env.nemo_gym.copy", "nobody"),
        ("~rolloutbus.broker.url", "rolloutbus.broker.url", None),
    ],
)
def test_overrides_are_read_as_hydra_reads_them(path: Path, override: str, key: str, value: object) -> None:
    assert OmegaConf.select(load_config(path, [override]), key) == value


@pytest.mark.parametrize("key", ["shards[5].replicas", "shards.5.replicas", "shards[2]"])
def test_an_index_that_a_list_lacks_is_told_with_those_it_has(path: Path, key: str) -> None:
    """It was `list index out of range`, Python's own words."""
    with pytest.raises(ConfigError, match=r"env\.nemo_gym\.shards has 2 entries, from 0 to 1$"):
        load_config(path, [f"env.nemo_gym.{key}=3"])


def test_keys_of_other_programs_stay_and_can_be_overridden(path: Path) -> None:
    path.write_text(CONFIG + "grpo: {steps: 1}\nrollout: {n: 8}\nenvs: []\n")
    root = load_config(path, ["grpo.steps=2", "+logger.dir=logs", "env.nemo_gym.n=${logger.dir}"])
    assert (OmegaConf.select(root, "grpo.steps"), OmegaConf.select(root, "env.nemo_gym.n")) == (2, "logs")


def test_check_says_that_a_config_has_no_settings_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("env: {nemo_gym: {policy: offline}}\nrollout: {n: 8}\n")
    assert "has no `rolloutbus`: run 'default', environment nemo_gym" in call("check", "-c", str(path)).said
    assert "has no" not in call("check", "-c", str(path), "rolloutbus.run=x").said


def test_the_config_keeps_its_folder(path: Path) -> None:
    assert load_config(path, None)["config_dir"] == str(path.parent)


def test_option_then_environment_then_config_names_the_broker(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = load_config(path, None)
    assert configured_url(root, None) == "redis://from-config:1/0"
    monkeypatch.setenv("REDIS_URL", "redis://from-environment:1/0")
    assert configured_url(root, None) == "redis://from-environment:1/0"
    assert configured_url(root, "redis://given:1/0") == "redis://given:1/0"
    monkeypatch.delenv("REDIS_URL")
    assert configured_url(load_config(path, ["~rolloutbus.broker.url"]), None) is None


def test_the_commands_broker_and_run_go_into_a_copy(path: Path) -> None:
    root = load_config(path, None)
    aimed = with_target(root, "redis://other:1/0", "exp2")
    assert OmegaConf.select(aimed, "rolloutbus.broker.url") == "redis://other:1/0"
    assert OmegaConf.select(aimed, "rolloutbus.run") == "exp2"
    assert OmegaConf.select(root, "rolloutbus.run") is None


def test_prompts_are_expanded_to_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    found = read_rows(str(path), 2, expanded=False)
    rows = found.rows
    assert [row["a"] for row in rows] == [1, 1, 2, 2]
    rows[0]["_rowidx"] = 0
    assert "_rowidx" not in rows[1]
    assert list(found.lines) == [1, 1, 3, 3]
    assert [row["a"] for row in read_rows(str(path), 2, expanded=True).rows] == [1, 2]


@pytest.mark.parametrize("locale", ["ascii", "latin-1"])
def test_rows_from_standard_input_are_read_as_from_a_file(monkeypatch: pytest.MonkeyPatch, locale: str) -> None:
    """What came through a pipe was read as the locale says, and its byte order mark was no JSON."""
    data = io.BytesIO('\ufeff{"a": "é雪"}\r\n\n{"a": 2}\n'.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data, encoding=locale, errors="surrogateescape"))
    found = read_rows("-", 1, expanded=False)
    assert [row["a"] for row in found.rows] == ["é雪", 2]
    assert list(found.lines) == [1, 3]
    assert not data.closed


def test_standard_input_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO(b'{"a": 1}\n{"a": "\xe9"}\n')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data, encoding="latin-1"))
    with pytest.raises(RowError, match="standard input is no UTF-8 text"):
        read_rows("-", 1, expanded=False)

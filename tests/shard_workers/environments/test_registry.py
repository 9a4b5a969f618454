"""Environments by name and by import path."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rolloutbus.broker.errors import ConfigError
from rolloutbus.shard_workers.environments import load_environment
from rolloutbus.shard_workers.environments.functions import FunctionsEnvironment
from rolloutbus.shard_workers.environments.import_path import NotImportableError, import_object, search_first
from rolloutbus.shard_workers.environments.registry import BUILT_IN, require_environment

SOURCE = """
class Whole:
    async def start(self, config): ...
    def list_entries(self): return {}
    async def run_rollouts(self, rows):
        for row in rows: yield row, {}
    async def health(self): ...
    async def stop(self): ...

class Half:
    async def start(self, config): ...
    def list_entries(self): return {}

class Demanding(Whole):
    def __init__(self, path): ...

class Unsigned(Whole, dict): ...

class Unreadable(Exception):
    def __str__(self): raise SystemExit("no message")

def factory(): ...
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    (tmp_path / "third_party_probe.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_functions_is_built_in_and_every_call_makes_a_new_one() -> None:
    first, second = load_environment("functions"), load_environment("functions")
    assert isinstance(first, FunctionsEnvironment)
    assert first is not second


def test_a_class_in_the_working_folder_is_found_by_its_import_path() -> None:
    assert type(load_environment("third_party_probe:Whole")).__name__ == "Whole"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as raised:
        load_environment("function")
    for name in BUILT_IN:
        assert name in str(raised.value)
    assert "rolloutbus.environment: 'function' is not known" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("third_party_probe:Half", "lacks run_rollouts, health, stop"),
        ("third_party_probe:Demanding", "cannot be made without arguments"),
        ("third_party_probe:factory", "is no class but function"),
        ("third_party_probe:Gone", "has no attribute 'Gone'"),
        ("no_such_package.module:Class", "there is no module 'no_such_package'"),
        (":Class", "say one of actor_class, functions, nemo_gym"),
    ],
)
@pytest.mark.parametrize("look", [load_environment, require_environment])
def test_a_class_that_is_no_environment_says_what_is_wrong(name: str, said: str, look: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        look(name)
    assert str(raised.value).startswith("rolloutbus.environment: ")
    assert said in str(raised.value)


def test_a_module_that_another_machine_may_have_is_told_from_a_mistake() -> None:
    with pytest.raises(NotImportableError):
        require_environment("no_such_package.module:Class")
    with pytest.raises(ConfigError) as raised:
        require_environment("third_party_probe:Gone")
    assert not isinstance(raised.value, NotImportableError)


def test_requiring_an_environment_makes_none(tmp_path: Path) -> None:
    source = "class Loud(Whole):\n    def __init__(self): raise RuntimeError('made')\n"
    (tmp_path / "loud_probe.py").write_text(f"from third_party_probe import Whole\n\n{source}")
    require_environment("loud_probe:Loud")


def test_a_reserved_name_that_is_not_shipped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "reserved_probe", ("not_written_yet", "Nothing"))
    with pytest.raises(ConfigError, match="this version of rolloutbus does not ship it"):
        load_environment("reserved_probe")


def test_folders_come_before_what_is_installed_and_after_the_standard_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A `grp.py` beside an environment stood for the standard library's, in the whole fleet."""
    monkeypatch.setattr(
        sys, "path", ["/bin", "/lib/python3.11", "/x/site-packages", str(tmp_path), "/usr/dist-packages"]
    )
    search_first([tmp_path, tmp_path / "more"])
    mine = [str(tmp_path), str(tmp_path / "more")]
    assert sys.path == ["/bin", "/lib/python3.11", *mine, "/x/site-packages", "/usr/dist-packages"]


def test_a_class_without_a_signature_is_fine() -> None:
    search_first([Path.cwd()])
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(import_object("third_party_probe:Unsigned", "key"))
    require_environment("third_party_probe:Unsigned")


def test_a_module_whose_error_cannot_be_read_is_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "unreadable_probe.py").write_text("from third_party_probe import Unreadable\nraise Unreadable\n")
    with pytest.raises(NotImportableError, match="failed with Unreadable: \\(its message cannot be read: SystemExit"):
        require_environment("unreadable_probe:Class")

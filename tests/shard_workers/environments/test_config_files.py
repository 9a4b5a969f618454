"""How files and the shard's own keys become one config."""

from __future__ import annotations

from pathlib import Path

import pytest
from rolloutbus.broker.errors import ConfigError
from rolloutbus.shard_workers.environments.config_files import merge_config_paths


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return path.name


def test_later_files_win_the_shards_own_keys_win_over_all_and_mappings_merge(folder: Path) -> None:
    first = write(folder / "a.yaml", "entry: {function: one, deep: {a: 1, b: 1, c: 1}}\nlist: [1, 2]\n")
    second = write(folder / "b.yaml", "entry: {deep: {b: 2, c: 2}}\nlist: [3]\n")
    merged = merge_config_paths({"config_paths": [first, second], "entry": {"deep": {"c": 3}}})
    assert merged["entry"] == {"function": "one", "deep": {"a": 1, "b": 2, "c": 3}}
    assert merged["list"] == [3]


def test_a_scalar_and_a_mapping_replace_each_other(folder: Path) -> None:
    path = write(folder / "a.yaml", "policy: offline\nother: {a: 1}\n")
    merged = merge_config_paths({"config_paths": [path], "policy": {"model": "m"}, "other": "text"})
    assert (merged["policy"], merged["other"]) == ({"model": "m"}, "text")


def test_interpolations_see_the_whole_merged_config(folder: Path) -> None:
    path = write(folder / "a.yaml", "entry: {limit: '${shared_limit}'}\n")
    assert merge_config_paths({"config_paths": [path], "shared_limit": 7})["entry"] == {"limit": 7}


def test_a_value_left_open_by_a_file_is_filled_from_the_top(folder: Path) -> None:
    path = write(folder / "a.yaml", "name: ???\n")
    assert merge_config_paths({"config_paths": [path], "name": "given"})["name"] == "given"
    with pytest.raises(ConfigError, match="does not resolve at name"):
        merge_config_paths({"config_paths": [path]})


def test_a_file_is_looked_for_in_the_working_folder_then_beside_the_config(folder: Path) -> None:
    beside = folder.parent / "beside"
    beside.mkdir()
    write(beside / "only_there.yaml", "from: beside\n")
    write(beside / "both.yaml", "from: beside\n")
    write(folder / "both.yaml", "from: work\n")
    found = [
        merge_config_paths({"config_paths": [name], "config_dir": str(beside)})["from"]
        for name in ("only_there.yaml", "both.yaml", str(beside / "both.yaml"))
    ]
    assert found == ["beside", "work", "beside"]


def test_a_python_object_passes_through_and_the_input_is_not_changed() -> None:
    marker = object()
    config = {"entry": {"function": "a:b", "object": marker}, "config_paths": None}
    assert merge_config_paths(config)["entry"]["object"] is marker
    assert config == {"entry": {"function": "a:b", "object": marker}, "config_paths": None}


def test_a_missing_file_names_every_place_that_was_looked_at(folder: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        merge_config_paths({"config_paths": ["gone.yaml"], "config_dir": "/nowhere"})
    looked = f"{folder / 'gone.yaml'} and /nowhere/gone.yaml"
    assert f"there is no file 'gone.yaml'; looked for {looked}" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fine: 1\nbroken: [1, 2\n", "line 3 is no valid YAML"),
        ("same: 1\nsame: 2\n", "line 2 is no valid YAML: found duplicate key same"),
        ("- a\n- b\n", "holds a list; its top level must be a mapping"),
        ("42\n", "cannot be read as a config"),
    ],
)
def test_a_file_that_is_no_config_is_named(folder: Path, text: str, said: str) -> None:
    path = write(folder / "bad.yaml", text)
    with pytest.raises(ConfigError) as raised:
        merge_config_paths({"config_paths": [path]})
    assert str(folder / "bad.yaml") in str(raised.value)
    assert said in str(raised.value)
    assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_a_file_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "bad.yaml").write_bytes(b"\xff\xfe\x00x")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        merge_config_paths({"config_paths": ["bad.yaml"]})


def test_an_interpolation_that_leads_nowhere_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"does not resolve at entry\.limit: .*not_there"):
        merge_config_paths({"entry": {"limit": "${not_there}"}})


@pytest.mark.parametrize("paths", ["a.yaml", [1], [""], {"a": 1}])
def test_config_paths_must_be_a_list_of_names(paths: object) -> None:
    with pytest.raises(ConfigError, match="is no list of file names"):
        merge_config_paths({"config_paths": paths})

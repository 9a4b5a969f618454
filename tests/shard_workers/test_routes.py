"""`build_route_shard_map` and `validate_dataset_routes`."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rolloutbus.shard_workers.plan import ShardSetupError
from rolloutbus.shard_workers.routes import build_route_shard_map, validate_dataset_routes

AGENT, SERVER, MODEL = "responses_api_agents", "resources_servers", "responses_api_models"
ROUTES = {"math_agent": "math", "math": "math", "code_agent": "code"}


def agent(name: str) -> dict[str, Any]:
    return {"agent_ref": {"name": name}}


def setup_error(datasets: Any, routes: dict[str, str] | None = ROUTES) -> str:
    with pytest.raises(ShardSetupError) as caught:
        validate_dataset_routes(routes, datasets)
    assert "JSONDecodeError" not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_routable_entries_lead_to_their_shard_and_others_do_not():
    entries = {"math": {"math_agent": [AGENT], "math": [SERVER, MODEL], "judge": [MODEL]}, "code": {"code": [SERVER]}}
    assert build_route_shard_map(entries) == {"math_agent": "math", "math": "math", "code": "code"}


@pytest.mark.parametrize("allowed", [frozenset[str](), frozenset({"shared"})])
def test_a_routable_entry_in_two_shards_is_refused_allowed_or_not(allowed: frozenset[str]):
    with pytest.raises(ShardSetupError, match=r"entry 'shared' can be routed to in shards 'code', 'math'"):
        build_route_shard_map({"math": {"shared": [AGENT]}, "code": {"shared": [SERVER]}}, allowed)


def test_another_entry_in_two_shards_is_refused_unless_allowed():
    entries = {"math": {"judge": [MODEL], "m": [AGENT]}, "code": {"judge": [MODEL]}}
    with pytest.raises(ShardSetupError, match=r"entry 'judge' runs in shards 'code', 'math'.*allowed_duplicate"):
        build_route_shard_map(entries)
    assert build_route_shard_map(entries, frozenset({"judge"})) == {"m": "math"}


def test_an_entry_that_is_a_route_in_one_of_two_shards_needs_the_allow_list():
    entries = {"math": {"x": [AGENT]}, "code": {"x": [MODEL]}}
    with pytest.raises(ShardSetupError, match="entry 'x' runs in shards 'code', 'math'"):
        build_route_shard_map(entries)
    assert build_route_shard_map(entries, {"x"}) == {"x": "math"}


def test_all_duplicates_are_told_at_once():
    entries: dict[str, dict[str, list[str]]] = {
        "a": {"x": [AGENT], "y": [MODEL]},
        "b": {"x": [AGENT], "y": [MODEL]},
        "c": {"y": []},
    }
    with pytest.raises(ShardSetupError, match=r"'x'.*'a', 'b'.*'y' runs in shards 'a', 'b', 'c'"):
        build_route_shard_map(entries)


@pytest.mark.parametrize("types", [AGENT, None, 3])
def test_a_report_that_is_no_list_of_types_is_refused(types: Any):
    with pytest.raises(ShardSetupError, match=r"shard 'math' reports .* for entry 'm'"):
        build_route_shard_map({"math": {"m": types}})


def test_hosted_rows_of_every_kind_of_source_pass(tmp_path: Path):
    path = jsonl(tmp_path / "val.jsonl", agent("math_agent"), {"task_source": "math"})
    datasets: dict[str, Any] = {
        "train": [agent("math_agent"), {"agent_ref": None, "task_source": "code_agent"}],
        "stream": (agent("math") for _ in range(2)),
        "validation": {"file": path, "text_path": str(path), "none": None},
    }
    validate_dataset_routes(ROUTES, datasets)
    validate_dataset_routes(ROUTES, [agent("math")])
    validate_dataset_routes(ROUTES, path)
    validate_dataset_routes(ROUTES, None)
    validate_dataset_routes(ROUTES, OmegaConf.create({"train": {"easy": str(path)}}))


def test_unhosted_routes_are_named_with_split_place_count_and_the_hosted_ones(tmp_path: Path):
    path = jsonl(tmp_path / "hard.jsonl", agent("math"), agent("gone"), agent("math_agen"), agent("gone"))
    message = setup_error({"train": [agent("math"), agent("lost")], "val": {"hard": path}})
    assert "split 'train' names 'lost' in 1 row, first row 1" in message
    assert f"split 'val/hard' names 'gone' in 2 rows, first {path} line 2" in message
    assert "'math_agen' (did you mean 'math_agent'?) in 1 row" in message
    assert "Hosted are 'code_agent' (shard 'code'), 'math' (shard 'math'), 'math_agent' (shard 'math')" in message


def test_a_map_without_routes_hosts_nothing():
    assert "Hosted are (none)" in setup_error([agent("math")], routes={})


def test_a_long_list_of_unhosted_routes_is_cut():
    message = setup_error({"train": [agent(f"r{index:03}") for index in range(50)]})
    assert "'r019'" in message
    assert "'r020'" not in message
    assert "and 30 more routes" in message


@pytest.mark.parametrize("routes", [None, {"*": "nemo_gym"}])
def test_an_unsharded_run_is_not_checked_and_nothing_is_read(routes: dict[str, str] | None):
    validate_dataset_routes(routes, {"train": [agent("anything"), {}], "val": "/no/such/file.jsonl"})


def test_a_row_without_a_route_is_named_by_number(tmp_path: Path):
    message = setup_error({"train": [agent("math"), {"responses_create_params": {}}]})
    assert message.startswith("split 'train', row 1: the row has no route")
    path = jsonl(tmp_path / "a.jsonl", agent("math"), agent(""))
    assert setup_error({"val": path}).startswith(f"split 'val', {path} line 2: the row has no route")


def test_broken_json_is_named_by_file_and_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"task_source": "math"}\n\n{"task_source": \n', encoding="utf-8")
    assert setup_error({"train": path}).startswith(f"split 'train', {path} line 3 is no valid JSON")


@pytest.mark.parametrize("line", ["[1]", '"math"', "3", "null"])
def test_a_line_that_is_no_object_is_named_by_file_and_line(tmp_path: Path, line: str):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line}\n", encoding="utf-8")
    assert f"{path} line 1 must be a JSON object" in setup_error({"train": path})


def test_blank_lines_a_byte_order_mark_and_a_missing_last_newline_are_fine(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"task_source": "math"}\r\n\r\n  \n{"task_source": "math"}')
    validate_dataset_routes(ROUTES, {"train": path})


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.jsonl", tmp_path, binary):
        assert f"split 'train': cannot read {path} as JSONL" in setup_error({"train": path})


@pytest.mark.parametrize("row", ["a.jsonl", 3, None, ["math"]])
def test_rows_that_are_no_dicts_are_named_by_number(row: object):
    assert setup_error({"train": [agent("math"), row]}).startswith("split 'train', row 1: a row must be a dict")


@pytest.mark.parametrize("source", [5, True, object()])
def test_a_split_that_is_no_data_is_refused(source: object):
    assert "split 'train' must be rows, the path of a JSONL file" in setup_error({"train": source})

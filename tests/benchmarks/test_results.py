from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contest import BenchmarkError
from benchmarks.results import Results, load, save
from tests.benchmarks.samples import MACHINE, compared, crowd_point, full


def test_a_partial_run_replaces_what_it_measured_and_leaves_the_rest() -> None:
    joined = full().joined(Results(machine=MACHINE, crowd=[crowd_point(10)]))
    assert [point.batches for point in joined.crowd] == [10]
    assert joined.model_copy(update={"crowd": full().crowd}) == full()


def test_a_payload_is_replaced_with_all_its_peers_and_the_other_payloads_stay() -> None:
    newer = compared(unix=5.0)
    del newer.batches["ray"]
    joined = full().joined(Results(machine=MACHINE, compared={"1.5 KB": newer}))
    assert joined.compared == {"1.5 KB": newer, "shared 2 MB prompt": full().compared["shared 2 MB prompt"]}


def test_results_of_another_machine_do_not_mix() -> None:
    elsewhere = Results(machine=MACHINE.model_copy(update={"cores": 64}), crowd=[crowd_point(1)])
    assert full().joined(elsewhere) == elsewhere


def test_saving_joins_to_what_the_file_holds(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    save(out, full())
    returned = save(out, Results(machine=MACHINE, low_load_ms={"tcp": [1.0]}))
    assert returned == load(out)
    assert returned.low_load_ms == {"tcp": [1.0]}
    assert returned.makespan == full().makespan


def test_a_file_of_another_shape_is_left_alone_and_named(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    out.write_text('{"1.5 KB": {}}', encoding="utf-8")
    with pytest.raises(BenchmarkError, match=r"results\.json does not hold results of this version.*remove it"):
        save(out, full())
    assert out.read_text(encoding="utf-8") == '{"1.5 KB": {}}'


def test_a_folder_as_the_file_of_results_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"is a folder; name a file in it"):
        load(tmp_path)

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from benchmarks import __main__ as program
from benchmarks import plot
from benchmarks.contest import BenchmarkError, Contestant, Order
from benchmarks.meter import PEAK_IS_TRUE, Meter

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"broker", "workers", "trainer"}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants are started as modules."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def others() -> set[psutil.Process]:
    """Children that another test's broker may still have."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def product() -> Generator[Contestant, None, None]:
    with Contestant("unix", "product", "unix", "1", "1") as contestant:
        yield contestant


def test_the_product_answers_orders_by_group_by_row_and_at_a_pace_and_leaves_nothing_behind(
    others: set[psutil.Process], product: Contestant
) -> None:
    processes = set(psutil.Process().children(recursive=True)) - others
    whole = product.run(Order("1.5 KB", 64, shards=1))
    assert whole.rows_per_s > 0
    assert 0 < whole.first_ms < 64_000 / whole.rows_per_s
    assert set(whole.cpu_s) == set(whole.peak_mb) == ROLES
    assert all(whole.peak_mb[role] >= whole.before_mb[role] > 0 for role in ROLES)
    assert product.run(Order("tiny", 64, shards=1, by_row=True)).first_ms > 0
    assert len(product.run(Order("1.5 KB", 8, shards=1, rate=400.0)).overhead_ms) == 8
    product.close()
    assert len(processes) >= 3
    assert psutil.wait_procs(list(processes), timeout=10)[1] == []


def test_the_thin_peer_answers_and_leaves_nothing_behind(others: set[psutil.Process]) -> None:
    with Contestant("thin", "thin_redis") as thin:
        processes = set(psutil.Process().children(recursive=True)) - others
        assert set(thin.run(Order("64 KB numpy", 64)).cpu_s) == ROLES
    assert psutil.wait_procs(list(processes), timeout=10)[1] == []


def test_a_contestant_that_ends_is_named_with_what_it_was_doing(product: Contestant) -> None:
    order = Order("no such kind", 64)
    with pytest.raises(BenchmarkError, match=r"contestant unix ended with code 1 in the middle of .*no such kind"):
        product.run(order)


def test_a_contestant_that_never_begins_is_named() -> None:
    with pytest.raises(BenchmarkError, match="contestant ghost ended with code 1 before it was ready"):
        Contestant("ghost", "no_such_module")


@pytest.mark.skipif(not PEAK_IS_TRUE, reason="this system keeps no high-water mark")
def test_memory_that_is_given_back_still_counts_in_the_peak() -> None:
    meter = Meter({"trainer": [psutil.Process().pid]})
    ballast = bytearray(b"x") * (64 << 20)
    del ballast
    assert meter.peak_mb()["trainer"] >= meter.before_mb["trainer"] + 60
    assert 0 < meter.cpu_s()["trainer"] < 60


def test_a_failure_is_told_in_a_line_and_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "require", lambda: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "report", "--out", str(tmp_path / "results.json")])
    assert program.main() == 1
    assert "benchmarks: report failed: there are no results in" in capsys.readouterr().err


def test_a_peer_that_nobody_knows_is_refused_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parser().parse_args(["compare", "--peers", "ray,kafka"])
    assert "'kafka' is none of ray, bare, thin, unix, tcp, aof" in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchmarkError, match=r"pip install 'rolloutbus\[bench\]'"):
        plot.require()

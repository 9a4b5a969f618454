from __future__ import annotations

import io

from rich.console import Console

from benchmarks.report import markdown, show
from benchmarks.results import Results
from benchmarks.tables import Table, tables
from tests.benchmarks.samples import MACHINE, compared, full


def table(title: str, results: Results | None = None) -> Table:
    return next(found for found in tables(results or full()) if found.title.startswith(title))


def test_rates_are_multiples_of_rays_with_their_range_and_the_goal() -> None:
    assert table("Rows per second").lines[0] == ["1.5 KB", "1,000/s", "10.0 × (9.0–12.0)", "12 ×"]


def test_a_peer_that_did_not_take_part_in_a_payload_has_no_figure_there() -> None:
    alone = compared()
    del alone.batches["ray"]
    results = Results(machine=MACHINE, compared={"1.5 KB": compared(), "1 MB numpy": alone})
    assert table("Rows per second", results).lines[1] == ["1 MB numpy", "–", "10,000/s", "1.6 ×, tcp 1.2 ×"]


def test_the_first_row_is_asked_through_the_row_api_and_the_first_group_stands_in_brackets() -> None:
    assert table("Milliseconds to the first row").lines[0] == ["1.5 KB", "10", "4 (10)"]


def test_costs_are_by_process() -> None:
    assert table("CPU seconds").lines[1] == ["", "unix", "0.100", "0.200", "0.300", "20", "60", "70"]


def test_instances_are_compared_to_the_cheapest() -> None:
    assert table("Cost of a 1.5 KB row").lines[1] == ["16", "1", "56.0", "1.37 ×", "70.0", "1.00 ×"]


def test_the_makespan_has_a_mean_over_its_seeds() -> None:
    assert table("Makespan").lines[-1] == ["2", "mean", "", "1.10 ×", "1.30 ×", "1.50 ×"]


def test_the_exponent_stands_under_the_batches() -> None:
    assert "power of 1.00" in table("One batch of more and more").note


def test_what_was_not_measured_has_no_table() -> None:
    assert tables(Results(machine=MACHINE)) == []


def test_where_memory_is_no_peak_the_report_says_so() -> None:
    results = Results(machine=MACHINE.model_copy(update={"peak_is_true": False}), compared={"1.5 KB": compared()})
    assert "resident at the end" in table("CPU seconds", results).note


def test_the_page_has_every_table_with_as_many_cells_as_columns() -> None:
    page = markdown(full(), "results.png")
    assert "A CPU, 2 cores" in page
    assert "](results.png)" in page
    for found in tables(full()):
        assert f"## {found.title}\n| {' | '.join(found.columns)} |" in page
        assert {len(line) for line in found.lines} == {len(found.columns)}


def test_on_a_terminal_of_80_columns_no_figure_is_torn() -> None:
    results = full()
    peers = results.compared["1.5 KB"].batches
    for name in ("bare", "tcp", "aof"):
        peers[name] = peers["unix"]
    terminal = io.StringIO()
    show(results, Console(file=terminal, width=80))
    words = terminal.getvalue().split()
    for found in tables(results):
        assert {word for line in found.lines for cell in line for word in cell.split()} <= {*words}

"""Results as a page (`report.md`) and on the terminal: the same tables, rendered twice."""

from __future__ import annotations

from pathlib import Path

import rich.box
import rich.table
from rich.console import Console
from rich.markup import escape

from benchmarks.results import Machine, Results
from benchmarks.tables import Table, tables

# More than these are set close, to fit into a terminal of 80 columns.
COLUMNS_WITH_AIR = 6


def markdown(results: Results, plot: str | None = None) -> str:
    """The whole page; with a picture where there is one."""
    parts = ["# Benchmark report", f"Written by `python -m benchmarks`. {facts(results.machine)}"]
    if plot:
        parts.append(f"![The same figures as a picture]({plot})")
    parts += [_markdown_table(table) for table in tables(results)]
    return "\n\n".join(parts) + "\n"


def facts(machine: Machine) -> str:
    """The machine in a sentence."""
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.system}; Python {machine.python}, {machine.server}, "
        f"Ray {machine.ray}."
    )


def _markdown_table(table: Table) -> str:
    head = f"| {' | '.join(table.columns)} |"
    rule = "|---" * len(table.columns) + "|"
    lines = [f"| {' | '.join(line)} |" for line in table.lines]
    return "\n".join([f"## {table.title}", head, rule, *lines, "", table.note])


def show(results: Results, console: Console) -> None:
    """Print all tables."""
    console.print(escape(facts(results.machine)))
    for table in tables(results):
        console.print(f"\n[bold]{escape(table.title)}[/]")
        console.print(_rich_table(table))
        console.print(f"[dim]{escape(table.note)}[/]")


def _rich_table(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 0 if len(table.columns) > COLUMNS_WITH_AIR else 1, 0, 0)
    )
    for at, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if at else "left", overflow="fold")
    for line in table.lines:
        drawn.add_row(*map(escape, line))
    return drawn


def write(results: Results, path: Path, plot: Path | None) -> None:
    """The page, beside the picture."""
    path.write_text(markdown(results, plot.name if plot else None), encoding="utf-8")

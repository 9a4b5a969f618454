"""How the command line prints: results to standard output, everything about them to standard error, tables that fit 80
columns.

Much of it is foreign text: messages of environments, names of hosts and clients. Its control characters are shown and
never sent, or a failed rollout could write to the terminal of whoever looks at it. JSON is for programs and stays.
"""

from __future__ import annotations

import codecs
import datetime
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# All but line ends and tabs; also what turns the direction of writing, and halves of characters, which no stream takes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def shown(text: str) -> str:
    """`text` with its control characters as Python writes them."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class PlainConsole(Console):
    """Prints text as it is: numbers are not coloured, brackets no markup, `:smile:` no emoji, control characters shown.

    Only what is given as `str` comes by here; who makes a `Text` says `shown` himself.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)

    def render_str(self, text: str, **options: Any) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().render_str(shown(text), **options)


class ShownFormatter(logging.Formatter):
    """For log lines, which become a `Text` elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


out = PlainConsole()
err = PlainConsole(stderr=True)

_UNITS = ("B", "KB", "MB", "GB", "TB")
_STEPS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "m"))


def say(text: str, style: str = "") -> None:
    """A remark about what is going on, to standard error."""
    err.print(text, style=style)


def print_json(value: Any) -> None:
    """One JSON document to standard output, never wrapped."""
    write_json([json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)])


def write_json(documents: Iterable[str]) -> None:
    """JSON texts to standard output, where they are when it returns."""
    # Not `sys.stdout`, in whose place a progress bar puts what prints to its own console, standard error.
    stream = cast(TextIO, out.file)
    # What the encoding lacks is escaped as Python writes it, and JSON knows no \xe9.
    if codecs.lookup(stream.encoding).name != "utf-8":
        documents = (_NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) for text in documents)
    stream.writelines(text + "\n" for text in documents)
    stream.flush()


def new_table(title: str, columns: Sequence[str], numbers: Iterable[str] = (), whole: Iterable[str] = ()) -> Table:
    """Columns in `numbers` stand to the right, those in `whole` are never broken; elsewhere long words fold."""
    heading = Text(title, style="bold") if title else None
    table = Table(
        title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    right, unbroken = set(numbers), set(whole)
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in unbroken
        )
    return table


def add_row(table: Table, *cells: object, style: str = "") -> None:
    """A row of plain text: nothing in it is taken for markup."""
    table.add_row(*("-" if cell is None else str(cell) for cell in cells), style=style)


def show_table(table: Table, console: Console = out) -> None:
    """The table and the empty line that keeps it apart from what follows."""
    console.print(table)
    console.print()


def seconds(value: float | None) -> str:
    """A duration as people say it: `0.42s`, `12.3s`, `4m05s`, `2h10m`, `3d04h`."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.2f}s" if value < 10 else f"{value:.1f}s"
    for at, (step, unit) in enumerate(_STEPS):
        if value >= step:
            smaller, name = (*_STEPS, (1.0, "s"))[at + 1]
            return f"{int(value // step)}{unit}{int(value % step // smaller):02d}{name}"
    return f"{value:.0f}s"


def size(value: float) -> str:
    """Bytes in the unit that keeps them short."""
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def clock(at_ms: int, *, date: bool = False) -> str:
    """Broker time in milliseconds as UTC."""
    at = datetime.datetime.fromtimestamp(at_ms / 1000, tz=datetime.UTC)
    return at.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S.") + ("" if date else f"{at_ms % 1000:03d}")

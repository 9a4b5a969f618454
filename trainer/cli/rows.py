"""The rows of a job from JSONL: prompts, each expanded to its generations, or rows that are expanded already."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from ...broker.errors import EncodeError, RowError, RowTypeError

STANDARD_INPUT = "-"
_STANDARD_NAME = "standard input"

Row = dict[str, Any]

_NUMBERED = re.compile(r"(first )?(?<!')\brow (\d+)\b")


@dataclass(frozen=True)
class FileRows:
    """Rows, and beside each the number of its line, which its reader knows it by; empty lines count, copies do not."""

    name: str
    rows: list[Row]
    lines: Sequence[int]

    def place(self, row: int) -> str:
        return f"{self.name} line {self.lines[row]}"

    def every(self, step: int) -> FileRows:
        """One row of each `step`."""
        return FileRows(self.name, self.rows[::step], self.lines[::step])

    @contextmanager
    def told_by_line(self) -> Generator[None]:
        """Errors of rows, which number them from 0 after they were expanded, name lines instead."""
        try:
            yield
        except (RowError, RowTypeError, EncodeError) as error:
            raise type(error)(_NUMBERED.sub(self._placed, str(error))) from None

    def _placed(self, found: re.Match[str]) -> str:
        row = int(found[2])
        return f"{'first at ' if found[1] else ''}{self.place(row)}" if row < len(self.lines) else found[0]


def read_rows(source: str, num_generations: int, *, expanded: bool) -> FileRows:
    """Read `source`, a file or `-`; without `expanded` each line becomes `num_generations` rows of their own.

    Raises `RowError` naming file and line. What the rows must hold is checked where they are published.
    """
    numbered, copies = list(_read(source)), 1 if expanded else num_generations
    rows = [dict(row) for _, row in numbered for _ in range(copies)]
    lines = [line for line, _ in numbered for _ in range(copies)]
    return FileRows(_STANDARD_NAME if source == STANDARD_INPUT else source, rows, lines)


def _read(source: str) -> Iterator[tuple[int, Row]]:
    if source == STANDARD_INPUT:
        # Python reads it as the locale says; the same bytes must be the same rows wherever they come from.
        lines = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="strict")
        try:
            yield from _lines(_STANDARD_NAME, lines)
        finally:
            # Or it would be closed with the wrapper.
            lines.detach()
        return
    try:
        with Path(source).open(encoding="utf-8-sig") as lines:
            yield from _lines(source, lines)
    except FileNotFoundError:
        raise RowError(f"there is no rows file {source}; give its path from the folder {Path.cwd()}") from None
    except OSError as error:
        raise RowError(
            f"cannot read {source}: {error.strerror or error}; give a JSONL file with one row per line"
        ) from None


def _lines(name: str, lines: TextIO) -> Iterator[tuple[int, Row]]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _row(f"{name} line {number}", line)
    except UnicodeDecodeError as error:
        raise RowError(f"{name} is no UTF-8 text after line {number} ({error.reason}); convert it") from None


def _row(place: str, line: str) -> Row:
    try:
        # Without its end, or an error at the end would be told as one at column 1 of the next line.
        row: object = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise RowError(
            f"{place} is no valid JSON: {error.msg} at column {error.colno}; mend or remove the line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"{place} cannot be read as JSON: {error}; mend or remove the line") from None
    if not isinstance(row, dict):
        raise RowError(f"{place} holds a {type(row).__name__}; each line must be a JSON object, one row")
    return cast(Row, row)

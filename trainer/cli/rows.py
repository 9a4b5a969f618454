"""The rows of a job from JSONL: prompts, each expanded to its generations, or rows that are expanded already."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from ...broker.errors import RowError

STANDARD_INPUT = "-"

Row = dict[str, Any]


def read_rows(source: str, num_generations: int, *, expanded: bool) -> list[Row]:
    """Read `source`, a file or `-`; without `expanded` each line becomes `num_generations` rows of their own.

    Raises `RowError` naming file and line. What the rows must hold is checked where they are published.
    """
    rows = list(_read(source))
    if expanded:
        return rows
    return [dict(row) for row in rows for _ in range(num_generations)]


def _read(source: str) -> Iterator[Row]:
    if source == STANDARD_INPUT:
        yield from _lines("standard input", sys.stdin)
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


def _lines(name: str, lines: TextIO) -> Iterator[Row]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(f"{name} line {number}", line)
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

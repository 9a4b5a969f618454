"""The trainer's own log: one JSON line per thing that happened, on the disk before anything else is done.

It is what a trainer's checkpoint would be. A line that a SIGKILL cut short counts as not written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.chaos.child import now_ms


class Journal:
    """Appends to `path`, synced line by line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def write(self, kind: str, **words: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "at": now_ms(), **words}).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole lines, in order."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]

"""What an instance prints, in a file of its log folder too. Ray's own files have it as before."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, Final, TextIO, cast

OUTPUT_FILE: Final = "instance.log"


@contextlib.contextmanager
def output_kept(folder: str | os.PathLike[str] | None) -> Generator[None]:
    """While it lasts, standard output and error are appended to `OUTPUT_FILE` in `folder` as well, which is made.

    What prints past Python's own streams (child processes, C libraries) is not in it. None changes nothing. Raises
    `OSError` where the file cannot be written.
    """
    if not folder:
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    before = sys.stdout, sys.stderr
    with (Path(folder) / OUTPUT_FILE).open("a", buffering=1, encoding="utf-8", errors="backslashreplace") as kept:
        sys.stdout, sys.stderr = (cast("TextIO", _Copied(stream, kept)) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Copied:
    """A stream as it was, but that what is written goes to `copy` first."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        # A full disk must not fail the rollout that prints, nor a logger that kept the stream for longer.
        with contextlib.suppress(OSError, ValueError):
            self._copy.write(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

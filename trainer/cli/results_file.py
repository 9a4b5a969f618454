"""Where the results of a job go: a file, or standard output. It is never one of the files that the job reads."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ...broker.errors import ConfigError, RolloutBusError
from .console import write_json

STANDARD = "-"

WriteLines = Callable[[Iterable[str]], None]


class ResultsError(RolloutBusError):
    """Results cannot be written any more, and nothing in the command is wrong."""


def check_writable(results: str, read: Iterable[str | Path]) -> None:
    """Raise `ConfigError` for a place where results cannot go; an earlier file stays until there are new ones.

    Nor can they go where the job reads from: `read` are its files, `-` among them for standard input.
    """
    _refuse_what_is_read(results, read)
    if results == STANDARD:
        return
    path = Path(results)
    if path.is_dir():
        raise ConfigError(f"--out {results} is a folder; give a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {results}: there is no folder {path.absolute().parent}; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--out {results} cannot be written; check its permissions")


def _refuse_what_is_read(results: str, read: Iterable[str | Path]) -> None:
    """By the file itself and not by its name: links and other spellings lead to it too, and so does a redirection."""
    target = _stat(results, sys.stdout)
    # A terminal or /dev/null may well be on both sides.
    if target is None or not stat.S_ISREG(target.st_mode):
        return
    for source in read:
        found = _stat(source, sys.stdin)
        if found is not None and os.path.samestat(found, target):
            raise ConfigError(
                f"--out {results} is the file {source} that the job reads, and results would overwrite it; "
                "give another file"
            )


def _stat(place: str | Path, standard: TextIO) -> os.stat_result | None:
    """None for what is not there, or is no file of the system's."""
    with contextlib.suppress(OSError, ValueError):
        return os.fstat(standard.fileno()) if str(place) == STANDARD else os.stat(place)
    return None


@contextmanager
def opened(results: str) -> Generator[WriteLines]:
    """What writes lines to the file for results, emptied, or to standard output; they are there when it returns.

    Raises `ResultsError` where the file takes no more. Errors of what is done meanwhile pass: many are `OSError` too.
    """
    if results == STANDARD:
        yield write_json
        return
    with _told(results):
        # A lone surrogate, which UTF-8 cannot carry, then stands as the escape that JSON has for it.
        file = Path(results).open("w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115

    def write(lines: Iterable[str]) -> None:
        with _told(results):
            file.writelines(line + "\n" for line in lines)
            file.flush()

    try:
        yield write
    finally:
        with _told(results):
            file.close()


@contextmanager
def _told(results: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(
            f"cannot write {results}: {error.strerror or error}; free space or choose another file"
        ) from None

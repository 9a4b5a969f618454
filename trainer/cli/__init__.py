"""The command line, `rolloutbus`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_STANDARD = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def main() -> None:
    """The console script. Importing what it does takes seconds, in which Ctrl-C has nothing to clean up."""
    with _left_on_interrupt():
        _open_closed_streams()
        from .app import app
        from .guard import output_watched
    with output_watched():
        app(prog_name="rolloutbus")


@contextmanager
def _left_on_interrupt() -> Generator[None]:
    """An exception in the middle of an import may become another there, and would show a stack."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _open_closed_streams() -> None:
    """A standard stream that the caller closed leads nowhere, here and in processes started from here, and not to the
    first socket that gets its number.
    """
    for number, name, mode in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115

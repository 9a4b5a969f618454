"""What stands around every command: its errors become one message and an exit code, its log goes to standard error.

Exit codes: 0 all is well, 1 something failed, 2 the caller's mistake, 130 Ctrl-C, 143 SIGTERM. A mistake never shows a
stack.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.logging import RichHandler

from ...broker.errors import ConfigError, EncodeError, RolloutBusError, RowError, RowTypeError
from .console import ShownFormatter, err, say

FAILED = 1
MISTAKE = 2
INTERRUPTED = 130

_MISTAKES = (ConfigError, RowError, RowTypeError, EncodeError)

Verbose = Annotated[
    int,
    typer.Option("--verbose", "-v", count=True, show_default=False, help="Log more: -v what happens, -vv everything."),
]


def exit_code(error: BaseException) -> int:
    """2 for what the caller can mend in the command, the config or the rows; 1 for what went wrong elsewhere."""
    return MISTAKE if isinstance(error, (*_MISTAKES, ValueError)) else FAILED


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with `-v`, logging set up, and its errors told in red instead of raised."""

    @functools.wraps(command)
    def run(*args: Any, verbose: int = 0, **options: Any) -> None:
        set_up_logging(verbose)
        try:
            command(*args, **options)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(interrupt.args[0] if interrupt.args else INTERRUPTED) from None
        except RolloutBusError as error:
            say(f"Error: {error}", "red")
            raise typer.Exit(exit_code(error)) from None

    # Typer keeps the line ends of a docstring, which a narrower terminal would break once more.
    run.__doc__ = "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n"))
    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=Verbose)
    shown = signature.replace(parameters=[*signature.parameters.values(), option])
    # Typer reads the signature, and resolves annotations by the wrapped module, which does not know `verbose`.
    run.__dict__.pop("__wrapped__", None)
    run.__dict__["__signature__"] = shown
    run.__annotations__ = {name: parameter.annotation for name, parameter in shown.parameters.items()}
    return run


class _Output(io.FileIO):
    """Remembers its last error. Another flush would not show whose an error was: what fails is not always kept."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _watched() -> _Output:
    """Standard output as it was, but that it remembers its error, and escapes what its encoding lacks: half a
    character, anything under a plain ASCII locale.
    """
    plain = sys.stdout
    output = _Output(plain.fileno(), "w", closefd=False)
    at_once = plain.line_buffering or getattr(plain, "write_through", False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output), plain.encoding, "backslashreplace", line_buffering=bool(at_once)
    )
    return output


@contextmanager
def output_watched() -> Generator[None]:
    """Around everything: output that cannot be written is told in a line, but for that of a reader who has left.

    Errors of other files and pipes pass: Ray's and the embedded broker's disk may be full too.
    """
    output = _watched()
    try:
        try:
            yield
        except SystemExit as end:
            # Typer takes every broken pipe for that of the output, and ends without a word.
            if isinstance(pipe := end.__context__, BrokenPipeError) and pipe is not output.error:
                raise pipe from None
            raise
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error is not output.error:
            raise
        # The interpreter flushes once more at its end, and must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            with contextlib.suppress(OSError):
                say(f"Error: cannot write the output: {error.strerror}; free space, or send it elsewhere", "red")
        sys.exit(FAILED)


def set_up_logging(verbose: int) -> None:
    """WARNING and above to standard error by default; through the console, so that a progress bar stays whole."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logger = logging.getLogger("rolloutbus")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = RichHandler(console=err, show_path=False, log_time_format="%H:%M:%S", omit_repeated_times=False)
    handler.setFormatter(ShownFormatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False

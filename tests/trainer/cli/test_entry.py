"""The console script around its commands: Ctrl-C while it is still importing, output that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "rolloutbus.trainer.cli"]
FULL = Path("/dev/full")

# Ctrl-C comes in the middle of the imports, inside of something that turns it into another error.
INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "rolloutbus.trainer.cli.app":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as error:
                raise ImportError("not importable") from error

sys.meta_path.insert(0, Interrupting())
from rolloutbus.trainer.cli import main
heavy = {"rich", "typer", "redis", "rolloutbus.trainer.client"} & set(sys.modules)
assert not heavy, heavy
main()
"""


def run(command: list[str], stdout: int | None = None) -> tuple[int, str]:
    """Its exit code, and what it said on standard error as one line."""
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, " ".join(done.stderr.split())


def test_ctrl_c_while_importing_is_code_130_and_no_stack() -> None:
    assert run([sys.executable, "-c", INTERRUPTED]) == (130, "")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [("acl", "--role", "worker"), ("acl", "--json"), ("-h",), ("run", "-h")])
def test_a_full_device_is_told_in_a_line(words: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        code, said = run([*COMMAND, *words], stdout=full.fileno())
    assert code == 1
    assert "Error: cannot write the output: No space left on device" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize("words", [("acl", "--role", "worker"), ("acl", "--json"), ("-h",)])
def test_a_closed_output_takes_nothing_and_shows_no_stack(words: tuple[str, ...]) -> None:
    code, said = run(["sh", "-c", 'exec "$0" "$@" >&-', *COMMAND, *words])
    assert code == 0
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_a_reader_who_has_left_is_told_nothing() -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait(20)
    assert reader.stdin is not None
    code, said = run([*COMMAND, "acl", "--run", "exp1", "--json"], stdout=reader.stdin.fileno())
    reader.stdin.close()
    assert (code, said) == (1, "")


def test_what_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    gym = '{policy: offline, snow雪: {function: "asyncio:sleep"}}'
    config = f"rolloutbus: {{environment: functions}}\nenv: {{nemo_gym: {gym}}}\n"
    (tmp_path / "c.yaml").write_text(config, encoding="utf-8")
    shown = subprocess.run(
        [*COMMAND, "check", "-c", "c.yaml"], cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"}, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert rb"snow\u96ea" in shown.stdout


# Where the console script's own command would be.
STANDING_IN = """
import errno, sys, typer
from rolloutbus.trainer.cli import app, main

command = typer.Typer()
app.app = command
word = sys.argv.pop()

@command.command()
def work() -> None:
"""
# The error of something else than the output, as Ray's start and the embedded broker raise it.
OTHERS_ERROR = f"""{STANDING_IN}
    print("an output")
    raise OSError(getattr(errno, word), "of another file")
main()
"""
PRINTING = f"""{STANDING_IN}
    print("an output\\n" * int(word))
main()
"""
CHILD = """
import subprocess, sys
from rolloutbus.trainer.cli import _open_closed_streams
_open_closed_streams()
child = "import os; assert os.readlink('/proc/self/fd/1') == os.devnull"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


@pytest.mark.parametrize("code", ["ENOSPC", "EPIPE"])
def test_errors_of_other_files_are_not_told_as_the_outputs(code: str) -> None:
    ended, said = run([sys.executable, "-c", OTHERS_ERROR, code], stdout=subprocess.DEVNULL)
    assert ended == 1
    assert "of another file" in said
    assert "cannot write the output" not in said


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 10_000])
def test_output_is_known_by_itself_also_where_no_buffer_keeps_it(
    unbuffered: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with FULL.open("w") as full:
        code, said = run([sys.executable, "-c", PRINTING, str(lines)], stdout=full.fileno())
    assert (code, said) == (
        1,
        "Error: cannot write the output: No space left on device; free space, or send it elsewhere",
    )


def test_a_closed_stream_is_nowhere_for_children_too() -> None:
    code, said = run(["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, CHILD])
    assert (code, said) == (0, "")

"""What is printed is shown as it is: foreign text sends nothing to the terminal. JSON is for programs and stays."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import Progress
from rolloutbus.broker.wording import counted
from rolloutbus.trainer.cli.console import ShownFormatter, print_json, shown
from rolloutbus.trainer.cli.results_file import STANDARD, opened

from .conftest import RUN, Stage, call

EVIL = "x\x1b]0;owned\x07\x1b[2J\rOK \x9b31m\u202e"
HARMLESS = r"x\x1b]0;owned\x07\x1b[2J\rOK \x9b31m\u202e"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("COLUMNS", "250")


def test_control_characters_are_shown_and_lines_and_other_scripts_stay() -> None:
    assert shown(EVIL) == HARMLESS
    assert shown("half \ud800") == r"half \ud800"
    assert shown("a\n\tb ü 雪 🙂 [bold] :smile:") == "a\n\tb ü 雪 🙂 [bold] :smile:"


def test_a_log_line_sends_no_control_characters() -> None:
    record = logging.LogRecord("n", logging.ERROR, "f", 1, "failed: %s", (EVIL,), None)
    assert ShownFormatter().format(record) == f"failed: {HARMLESS}"


@pytest.mark.parametrize(("number", "said"), [(0, "0 open batches"), (1, "1 open batch"), (2, "2 open batches")])
def test_one_is_counted_as_one(number: int, said: str) -> None:
    assert counted(number, "open batch", "open batches") == said
    assert counted(number, "group") == f"{number} group{'s' * (number != 1)}"


def bury(stage: Stage) -> str:
    """A dead letter whose every word is evil; where it lies."""
    fields = {"batch": "b", "group": "0", "client": EVIL, "route": EVIL, "reason": EVIL, "failed_on": EVIL}
    return str(stage.redis.xadd(stage.keys.dead, fields))


@pytest.mark.parametrize("words", [("list",), ("show", "b:0")])
def test_a_dead_letter_sends_no_control_characters(stage: Stage, words: tuple[str, ...]) -> None:
    bury(stage)
    said = call("dead", *words).out
    assert HARMLESS in said
    assert not [character for character in said if character in "\x1b\x07\r\x9b\u202e"]


def test_status_and_explain_send_no_control_characters(stage: Stage) -> None:
    bury(stage)
    event = {"kind": "taken", "batch": "b", "group": "0", "instance": EVIL, "detail": EVIL}
    stage.redis.xadd(stage.keys.events, event)
    stage.redis.hset(stage.keys.batch("b"), mapping={"client": EVIL, "state": EVIL, "groups": EVIL})
    stage.redis.hset(stage.keys.instance("math"), mapping={"host": EVIL})
    for words in (("status",), ("explain", "b", "0"), ("doctor",)):
        said = call(*words, code=1 if words == ("doctor",) else 0).out
        assert not [character for character in said if character in "\x1b\x07\r\x9b\u202e"], words
    assert HARMLESS in call("status").out
    assert HARMLESS in call("explain", "b", "0").out


def test_an_error_sends_no_control_characters(stage: Stage) -> None:
    said = call("cancel", f"{EVIL}", "--run", RUN, code=1).err
    assert "\x1b" not in said
    assert "\x07" not in said


def test_json_keeps_what_it_was_given(stage: Stage) -> None:
    bury(stage)
    (letter,) = json.loads(call("dead", "list", "--json").out)["dead_letters"]
    assert letter["client"] == EVIL


TEXT = "é 雪 🙂 \x85 half \udcff"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "UTF8", "utf-16-le"])
def test_json_is_json_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """What the encoding lacks came as Python's escapes, such as `\\xe9` and `\\U0001f642`, which JSON does not know."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding, "backslashreplace"))
    print_json({"text": TEXT})
    with opened(STANDARD) as write:
        write([json.dumps({"text": TEXT}, ensure_ascii=False)])
    document, line = written.getvalue().decode(encoding).removesuffix("\n").rsplit("\n", 1)
    assert (json.loads(document), json.loads(line)) == ({"text": TEXT}, {"text": TEXT})
    assert ("雪" in line) == (encoding in ("utf-8", "UTF8"))


def test_results_beside_a_progress_bar_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich puts something in the place of `sys.stdout` that prints to the bar's console; `--out - | jq` got nothing."""
    terminal = Console(stderr=True, force_terminal=True)
    with Progress(console=terminal), opened(STANDARD) as write:
        assert isinstance(sys.stdout, FileProxy)
        write(['{"text": "é"}'])
    said = capsys.readouterr()
    assert said.out == '{"text": "é"}\n'
    assert "text" not in said.err

"""`--help` of every command says all that its options and its docstring say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.trainer.cli.app import app
from typer.main import get_command

from .conftest import call


def commands(group: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *above, name)
        else:
            yield (*above, name), command


def letters(text: str) -> str:
    """What is left when a help text is broken, framed and marked as code."""
    return re.sub(r"[^\w\[\]{}()<>=:./,;*+-]|[─│╭╮╰╯]", "", text)


@pytest.mark.parametrize(
    ("words", "command"), [pytest.param(*found, id=found[0][-1]) for found in commands(get_command(app))]
)
def test_help_swallows_nothing(words: tuple[str, ...], command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich took `[server types]` for markup and left it out."""
    monkeypatch.setenv("COLUMNS", "1000")
    shown = letters(call(*words, "--help").out)
    texts = [command.help, *(parameter.help for parameter in command.params if parameter.name != "help")]
    for text in texts:
        assert letters(text.replace("\\[", "[")) in shown


def test_the_readme_has_every_way_to_give_prompts_to_run() -> None:
    """It said that only `run` repeats a prompt, and not how to say that the file has done so."""
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    run: Any = next(command for words, command in commands(get_command(app)) if words == ("run",))
    options = {word for parameter in run.params for word in parameter.opts}
    for option in ("--rows", "--num-generations", "--expanded"):
        assert option in options
        assert option in readme

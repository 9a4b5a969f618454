"""`rolloutbus`: every command, and nothing else; what a command does stands in its own file."""

from __future__ import annotations

from collections.abc import Callable

import typer

from .acl_command import acl
from .broker_command import broker
from .cancel_command import cancel
from .check_command import check
from .dead_commands import drop, list_letters, replay, show_letter
from .doctor_command import doctor
from .explain_command import explain
from .fleet_commands import drain, scale, up
from .guard import guarded
from .run_command import run
from .status_command import status

RUNNING = "Run"
LOOKING = "Look"
CHANGING = "Change"

_COMMANDS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("run", RUNNING, run),
    ("up", RUNNING, up),
    ("check", RUNNING, check),
    ("broker", RUNNING, broker),
    ("status", LOOKING, status),
    ("explain", LOOKING, explain),
    ("doctor", LOOKING, doctor),
    ("acl", LOOKING, acl),
    ("cancel", CHANGING, cancel),
    ("scale", CHANGING, scale),
    ("drain", CHANGING, drain),
)
_DEAD: tuple[tuple[str, Callable[..., None]], ...] = (
    ("list", list_letters),
    ("show", show_letter),
    ("replay", replay),
    ("drop", drop),
)


def _new(text: str) -> typer.Typer:
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


app = _new("Reinforcement-learning rollouts over Redis Streams: whole prompt groups, nothing lost, nothing doubled.")
dead = _new("Groups that failed for good: list, show, replay, drop.")

for _name, _panel, _command in _COMMANDS:
    app.command(_name, rich_help_panel=_panel)(guarded(_command))
for _name, _command in _DEAD:
    dead.command(_name)(guarded(_command))
app.add_typer(dead, name="dead", rich_help_panel=CHANGING)

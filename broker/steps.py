"""Steps: one command, or several that are one transaction, sent many at a time.

A step's answer is the list of its replies, or the error that refused it as a whole. When the server has forgotten a
script (SCRIPT FLUSH), what the transaction had added is deleted again, the scripts are loaded and the step is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .channel import Command, ReplyError, raise_first_error
from .handshake import translate
from .scripts import SCRIPTS

Step = Sequence[Command]
# Each repetition needs that somebody flushed the scripts in between; more often, the server keeps none.
REPETITIONS = 5


class Runner(Protocol):
    """Whatever sends commands and brings their replies: a `Link`, or a test's stand-in."""

    async def run(self, commands: Sequence[Command]) -> list[Any]: ...


async def ask(runner: Runner, commands: Sequence[Command]) -> list[Any]:
    """The replies to plain `commands`; raises the first error among them as one of ours."""
    replies = await runner.run(commands) if commands else []
    raise_first_error(replies)
    return replies


async def run_steps(runner: Runner, steps: Sequence[Step]) -> list[list[Any] | Exception]:
    """Send all steps in one write; per step its replies, or `BrokerFullError` or another of our errors."""
    return [_judge(answer) for answer in await _run(runner, steps, REPETITIONS)]


async def _run(runner: Runner, steps: Sequence[Step], repetitions: int) -> list[Any]:
    answers = _split(steps, await runner.run(_flatten(steps)))
    forgotten = [at for at, answer in enumerate(answers) if _says(answer, "NOSCRIPT")]
    if forgotten:
        loads = [("SCRIPT", "LOAD", script.source) for script in SCRIPTS.values()]
        raise_first_error(await runner.run([*_undo(steps, answers, forgotten), *loads]))
    if forgotten and repetitions:
        again = await _run(runner, [steps[at] for at in forgotten], repetitions - 1)
        for at, answer in zip(forgotten, again, strict=True):
            answers[at] = answer
    return answers


async def run_step(runner: Runner, *commands: Command) -> list[Any]:
    """One step; raises what refused it."""
    answer = (await run_steps(runner, [commands]))[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


def _flatten(steps: Sequence[Step]) -> list[Command]:
    commands: list[Command] = []
    for step in steps:
        commands.extend(step if len(step) == 1 else (("MULTI",), *step, ("EXEC",)))
    return commands


def _split(steps: Sequence[Step], replies: list[Any]) -> list[Any]:
    answers: list[Any] = []
    at = 0
    for step in steps:
        if len(step) == 1:
            answers.append([replies[at]])
            at += 1
            continue
        end = at + len(step) + 1
        executed = replies[end]
        queued_errors = [reply for reply in replies[at:end] if isinstance(reply, ReplyError)]
        answers.append(queued_errors[0] if queued_errors else executed)
        at = end + 1
    return answers


def _says(answer: Any, word: str) -> bool:
    # The script is a step's last command.
    told = answer[-1] if isinstance(answer, list) and answer else answer  # pyright: ignore[reportUnknownVariableType]
    return isinstance(told, ReplyError) and str(told).startswith(word)


def _undo(steps: Sequence[Step], answers: Sequence[Any], forgotten: Sequence[int]) -> list[Command]:
    commands: list[Command] = []
    for at in forgotten:
        for command, reply in zip(steps[at], answers[at], strict=True) if isinstance(answers[at], list) else ():
            if command[0] == "XADD" and isinstance(reply, bytes):
                commands.append(("XDEL", command[1], reply))
    return commands


def _judge(answer: Any) -> list[Any] | Exception:
    """The replies of a step that ran, the script's own error among them raised to the whole step."""
    if isinstance(answer, list):
        errors = [reply for reply in answer if isinstance(reply, ReplyError)]  # pyright: ignore[reportUnknownVariableType]
        if not errors:
            return answer  # pyright: ignore[reportUnknownVariableType]
        answer = errors[-1]
    return translate(answer, "the broker")

"""What an operator asks of a running fleet: `rolloutbus scale` and `rolloutbus drain`, each in a process of its own.

An operator who was told nothing certain, because the broker was away, does not know how many instances there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rolloutbus.broker.errors import FleetError

from tests.chaos.fleet_faults import Fault, kill_process, restart_broker, some_label
from tests.chaos.fleet_plan import Operation
from tests.chaos.fleet_stage import BROKER_AWAY, FleetStage

SUPERSEDED = "superseded by a later request"
COMMAND = Path(sys.executable).with_name("rolloutbus")


async def _command(stage: FleetStage, *words: str) -> None:
    """Run the command line; raises `FleetError` with what it said when it failed."""
    # Rich breaks lines at the width of a terminal.
    surroundings = {**os.environ, "REDIS_URL": stage.broker.url, "COLUMNS": "2000"}
    process = await asyncio.create_subprocess_exec(
        COMMAND, *words, env=surroundings, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        raise FleetError(failure(said.decode(), process.returncode))


def failure(said: str, code: int) -> str:
    """Why a command failed, by what it said."""
    return said.rpartition("Error: ")[2].strip() or f"exit code {code}"


async def _ask(
    stage: FleetStage, operation: Operation, words: tuple[str, ...], shard: str, after: Callable[[int], int]
) -> None:
    with stage.timed(stage.struck(operation, f"ask to {' '.join(words)}")), stage.change(shard, after):
        try:
            await _command(stage, *words, "--run", stage.running.run)
        except FleetError as error:
            if any(unsure in str(error) for unsure in (*BROKER_AWAY, SUPERSEDED)):
                stage.blurred.add(shard)
            raise


async def _ask_scale(stage: FleetStage, operation: Operation) -> None:
    by = operation.many if operation.victim % 3 else -operation.many
    wanted = max(1, stage.expected[operation.shard] + by)
    await _ask(stage, operation, ("scale", operation.shard, str(wanted)), operation.shard, lambda _: wanted)


async def _ask_drain(stage: FleetStage, operation: Operation, label: str = "") -> None:
    label = label or some_label(stage, operation)
    await _ask(stage, operation, ("drain", label), label.split("/")[0], lambda count: count - 1)


async def _ask_either(stage: FleetStage, operation: Operation) -> None:
    await (_ask_scale if operation.victim % 2 else _ask_drain)(stage, operation)


async def _ask_twice(stage: FleetStage, operation: Operation) -> None:
    """The same thing, or two that meet: of two requests about one thing the later one holds."""
    stage.tolerated |= {SUPERSEDED}
    other = replace(operation, victim=operation.victim + (0 if operation.overlaps else 1))
    await asyncio.gather(_ask_either(stage, operation), _after_pause(stage, other, _ask_either))


async def _after_pause(stage: FleetStage, operation: Operation, then: Fault) -> None:
    await asyncio.sleep(operation.pause_s)
    await then(stage, operation)


async def _ask_and_restart(stage: FleetStage, operation: Operation) -> None:
    """The broker goes while somebody asks, or somebody asks while it is away."""
    first, second = (_ask_either, restart_broker) if operation.overlaps else (restart_broker, _ask_either)
    await asyncio.gather(first(stage, operation), _after_pause(stage, operation, second))


async def _ask_and_slow(stage: FleetStage, operation: Operation) -> None:
    await asyncio.gather(_ask_either(stage, operation), _after_pause(stage, operation, _hold_up))


async def _hold_up(stage: FleetStage, operation: Operation) -> None:
    """The fleet's own thread, longer than its lease at times."""
    stage.struck(operation, f"hold up the fleet for {stage.plan.hold_s:g} s").took_s = 0.0
    loop = stage.running._thread.loop  # pyright: ignore[reportPrivateUsage]
    loop.call_soon_threadsafe(time.sleep, stage.plan.hold_s)


async def _ask_and_kill(stage: FleetStage, operation: Operation) -> None:
    """A drain of an instance that is just dying: killed a moment before, or after."""
    label = some_label(stage, operation)

    async def kill(stage: FleetStage, operation: Operation) -> None:
        held = await stage.held_by(label)
        for at in [at for at in stage.running.status() if at.label == label]:
            kill_process(stage, operation, at.pid, f"kill {label}, which is {at.state}", held)

    await asyncio.gather(_ask_drain(stage, operation, label), _after_pause(stage, operation, kill))


ASKED: dict[str, Fault] = {
    "scale-asked": _ask_scale,
    "drain-asked": _ask_drain,
    "asked+asked": _ask_twice,
    "asked+restart": _ask_and_restart,
    "asked+slow": _ask_and_slow,
    "asked+kill": _ask_and_kill,
}

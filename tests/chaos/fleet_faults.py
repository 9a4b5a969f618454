"""Operations on a fleet from its own process, and faults of its instances, its broker and its nodes.

An operation waits for groups that the trainer logged, not for the clock.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from tests.chaos.fleet_plan import ONE_NODE_EACH, Operation
from tests.chaos.fleet_stage import BROKER_AWAY, KILLED_IN_START, FleetStage, in_thread, instance_pids

Fault = Callable[[FleetStage, Operation], Coroutine[Any, Any, None]]


async def _scale(stage: FleetStage, operation: Operation, *, by: int) -> None:
    name = operation.shard
    wanted = max(1, stage.expected[name] + by)
    with stage.timed(stage.struck(operation, f"scale {name} to {wanted}")), stage.change(name, lambda _: wanted):
        await in_thread(lambda: stage.running.scale(name, wanted))


async def _up(stage: FleetStage, operation: Operation) -> None:
    await _scale(stage, operation, by=operation.many)


async def _down(stage: FleetStage, operation: Operation) -> None:
    await _scale(stage, operation, by=-operation.many)


def some_label(stage: FleetStage, operation: Operation) -> str:
    labels = [label for shard in sorted(stage.running.labels) for label in stage.running.labels[shard]]
    return labels[operation.victim % len(labels)]


async def _drain(stage: FleetStage, operation: Operation) -> None:
    label = some_label(stage, operation)
    with stage.timed(stage.struck(operation, f"drain {label}")), stage.change(label.split("/")[0], lambda n: n - 1):
        await in_thread(lambda: stage.running.drain(label))


async def _kill(stage: FleetStage, operation: Operation) -> None:
    processes = instance_pids()
    victims = [at for at in stage.running.status() if at.pid in processes]
    if victims:
        victim = victims[operation.victim % len(victims)]
        held = await stage.held_by(victim.label)
        kill_process(stage, operation, victim.pid, f"kill {victim.label}, which is {victim.state}", held)


def kill_process(stage: FleetStage, operation: Operation, pid: int, what: str, held: set[str] | None = None) -> None:
    """Nothing where it has gone meanwhile: its number may be somebody else's."""
    if pid in instance_pids():
        stage.tolerated |= {*KILLED_IN_START}
        stage.struck(operation, what, held).took_s = 0.0
        os.kill(pid, signal.SIGKILL)


async def _scale_and_drain(stage: FleetStage, operation: Operation) -> None:
    await _together(stage, operation, _drain)


async def _scale_and_kill(stage: FleetStage, operation: Operation) -> None:
    await (_kill_newcomer(stage, operation) if operation.victim % 3 else _together(stage, operation, _kill))


async def _together(stage: FleetStage, operation: Operation, second: Fault) -> None:
    """The second thing when the scaling has just begun, or when it has just returned."""
    by = operation.many if operation.victim % 4 else -operation.many
    scaling = asyncio.create_task(_scale(stage, operation, by=by))
    if not operation.overlaps:
        await scaling
    await asyncio.sleep(operation.pause_s)
    await asyncio.gather(scaling, second(stage, operation))


async def _kill_newcomer(stage: FleetStage, operation: Operation) -> None:
    """One that is just starting, or one that is up while the other of the same change is not."""
    seen, by = (stage.up, 2) if operation.victim % 3 == 2 else (instance_pids, operation.many)
    before = seen()
    scaling = asyncio.create_task(_scale(stage, operation, by=by))
    # A process that Ray starts tells nobody.
    while not scaling.done() and seen() <= before:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(operation.pause_s)
    for pid in sorted(seen() - before)[:1]:
        labels = {at.pid: at.label for at in stage.running.status()}
        kill_process(stage, operation, pid, f"kill a newcomer, {labels.get(pid, 'which is starting')}")
    await scaling


async def restart_broker(stage: FleetStage, operation: Operation) -> None:
    stage.tolerated |= {*BROKER_AWAY}
    with stage.timed(stage.struck(operation, f"restart the broker after {stage.plan.hold_s:g} s")):
        await asyncio.to_thread(stage.broker.kill)
        await asyncio.sleep(stage.plan.hold_s)
        await asyncio.to_thread(stage.broker.restart)


async def _lose_node(stage: FleetStage, operation: Operation) -> None:
    """A node with instances; never the last one. Where each instance needs a node of its own, another comes for it."""
    there = stage.nodes.ids()
    homes = sorted({at.node for at in stage.running.status() if at.state == "running"} & there)
    if not homes or len(there) < 2:
        return
    home = homes[operation.victim % len(homes)]
    stage.nodes.going.add(home)
    labels = [at.label for at in stage.running.status() if at.node == home]
    held = set[str]().union(*[await stage.held_by(label) for label in labels])
    stage.tolerated |= {*KILLED_IN_START}
    how = "all at once" if operation.overlaps else "its raylet first"
    frozen_s = 2 * stage.plan.hold_s if operation.many > 1 else 0
    what = f"lose the node of {' '.join(labels)}, {how}, frozen for {frozen_s:g} s before"
    with stage.timed(stage.struck(operation, what, held)):
        await asyncio.to_thread(stage.nodes.lose, home, at_once=operation.overlaps, frozen_s=frozen_s)
    if stage.fleet_plan.strategy == ONE_NODE_EACH:
        await asyncio.sleep(stage.plan.hold_s)
        stage.nodes.fill()


FAULTS: dict[str, Fault] = {
    "scale-up": _up,
    "scale-down": _down,
    "drain": _drain,
    "kill": _kill,
    "scale+drain": _scale_and_drain,
    "scale+kill": _scale_and_kill,
    "broker-restart": restart_broker,
    "node-lost": _lose_node,
}

"""The faults, each a coroutine that strikes a stage at the place its plan says, and mends what an operator would mend.

A fault returns when it is over; the schedule then goes on to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any

import redis.exceptions

from tests.chaos.actors import Actor
from tests.chaos.child import now_ms
from tests.chaos.plan import KILL_POINTS, LEASE_S, Plan
from tests.chaos.stage import PATIENCE_S, Stage

Fault = Callable[[Stage, Plan], Coroutine[Any, Any, None]]


def _victim(stage: Stage, plan: Plan) -> Actor:
    labels = sorted(stage.workers)
    return stage.workers[labels[plan.victim % len(labels)]]


async def worker_killed(stage: Stage, plan: Plan) -> None:
    """The victim carries its kill point from the start; it dies there, or outlives the batch."""
    victim = stage.workers[next(iter(kill_orders(plan)[0]))]
    await stage.progress.until(lambda: victim.gone or stage.progress.over)
    if victim.gone and victim.code == -signal.SIGKILL:
        stage.struck(victim.held)
        await _replace(stage, plan, victim)


async def _replace(stage: Stage, plan: Plan, victim: Actor) -> None:
    """As a fleet does: a new process under the old label, sooner or later, or never while others live."""
    await asyncio.sleep(plan.replace_after_s)
    shard = victim.name.split("/")[0]
    others = [worker for worker in stage.workers.values() if worker.name.split("/")[0] == shard and not worker.gone]
    if not others or plan.replace_after_s < 2:
        await stage.add_worker(victim.name)


async def poisoned(stage: Stage, plan: Plan) -> None:
    """A group ends whoever runs it, until it has no attempt left; each process is replaced under its label."""
    while not stage.progress.over:
        await stage.progress.until(lambda: bool(_killed(stage)) or stage.progress.over)
        for victim in _killed(stage):
            stage.struck(victim.held)
            await asyncio.sleep(plan.replace_after_s)
            await stage.add_worker(victim.name)


def _killed(stage: Stage) -> list[Actor]:
    return [worker for worker in stage.workers.values() if worker.code == -signal.SIGKILL]


async def worker_paused(stage: Stage, plan: Plan) -> None:
    """SIGSTOP while it holds groups, past its lease, then SIGCONT: it must find out that it lost them, or its label."""
    victim = _victim(stage, plan)
    await stage.logged(plan.at)
    await stage.progress.until(lambda: bool(victim.held) or stage.progress.over)
    if stage.progress.over:
        return
    stage.struck(victim.held)
    with victim.hindered(heard=False):
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S * 1.3 + plan.hold_s)
        replaced = plan.dice("paused").random() < 0.4
        if replaced:
            newer = await stage.add_worker(victim.name)
            await stage.progress.until(lambda: newer.up or newer.gone)
        victim.signal(signal.SIGCONT)
    # From here on what it does counts, also until it knows that it was replaced.
    with victim.hindered():
        if replaced and not await victim.wait(PATIENCE_S):
            stage.complaints.append(f"{victim.name} did not end although another process has its label")


async def broker_restarted(stage: Stage, plan: Plan) -> None:
    if await stage.logged(plan.at):
        stage.struck()
        with stage.disturbance():
            await asyncio.to_thread(stage.broker.kill)
            await asyncio.sleep(plan.hold_s)
            await stage.restart_broker()


async def broker_cut(stage: Stage, plan: Plan) -> None:
    """As after a power failure with `everysec`: the last second is gone, the last command cut in its middle."""
    watching = asyncio.create_task(stage.watch_aof())
    try:
        if not await stage.logged(plan.at):
            return
        stage.data_lost = True
        stage.struck()
        # What the broker's record lost, nobody can judge.
        stage.disturbed.append((now_ms(), math.inf))
        await asyncio.to_thread(stage.broker.kill)
    finally:
        watching.cancel()
    _cut(stage, plan.dice("cut"))
    await asyncio.sleep(plan.hold_s)
    await stage.restart_broker()
    await stage.write_run()


def _cut(stage: Stage, dice: random.Random) -> None:
    path = stage.aof_path()
    assert path is not None
    since = time.monotonic() - dice.uniform(0.1, 1.0)
    size = path.stat().st_size
    kept = max((length for at, length in stage.aof_sizes if at <= since), default=size)
    os.truncate(path, min(size, kept + dice.randrange(0, 200)))


async def broker_frozen(stage: Stage, plan: Plan) -> None:
    if await stage.logged(plan.at) and stage.broker.pid is not None:
        stage.struck()
        with stage.disturbance():
            os.kill(stage.broker.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(plan.hold_s)
            finally:
                os.kill(stage.broker.pid, signal.SIGCONT)


async def connections_killed(stage: Stage, plan: Plan) -> None:
    """CLIENT KILL of everybody, a few times."""
    dice = plan.dice("connections")
    if not await stage.logged(plan.at):
        return
    stage.struck()
    async with stage.control() as control:
        with stage.disturbance():
            for _ in range(dice.randrange(1, 6)):
                await control.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await asyncio.sleep(dice.uniform(0, 0.4))


def _network(mode: str) -> Fault:
    async def strike(stage: Stage, plan: Plan) -> None:
        dice = plan.dice(f"net-{mode}")
        if not await stage.logged(plan.at):
            return
        names = sorted(stage.proxies)
        hit = names if dice.random() < 0.4 else [names[plan.victim % len(names)]]
        held = {group for name in hit if name in stage.workers for group in stage.workers[name].held}
        stage.struck(held)
        with _hindered(stage, hit, mode):
            for name in hit:
                stage.proxies[name].misbehave(mode)
            await asyncio.sleep(dice.choice([0.3, 1.0, 2.5]) + (plan.hold_s if mode != "slow" else 2))
            for name in hit:
                stage.proxies[name].heal()

    return strike


@contextlib.contextmanager
def _hindered(stage: Stage, names: Sequence[str], mode: str) -> Generator[None]:
    """A worker behind a bad network can take nothing; where it is the trainer's, nobody can."""
    with contextlib.ExitStack() as stack:
        for name in names:
            hit = stage.workers.get(name)
            stack.enter_context(hit.hindered(heard=mode == "slow") if hit else stage.disturbance())
        yield


async def memory_full(stage: Stage, plan: Plan) -> None:
    """`maxmemory` below what is used, for a while. Not before the workers are up: one that starts then ends at once,
    and no fleet is here to start it again.
    """
    await stage.progress.until(lambda: all(worker.up or worker.gone for worker in stage.workers.values()))
    if not await stage.logged(plan.at):
        return
    stage.struck()
    async with stage.control() as control:
        used = (await control.info("memory"))["used_memory"]
        with stage.disturbance():
            await control.config_set("maxmemory", int(used * plan.dice("memory").uniform(0.6, 1.02)))
            await asyncio.sleep(0.5 + plan.hold_s)
            await control.config_set("maxmemory", 0)


async def trainer_killed(stage: Stage, plan: Plan) -> None:
    """It dies at its kill point, after receiving or after logging a group, and comes back under its name."""
    trainer = stage.trainer
    assert trainer is not None
    stage.trainer_crashed = True
    await stage.progress.until(lambda: trainer.gone or stage.progress.over)
    if not stage.progress.over:
        stage.struck()
        await asyncio.sleep(min(plan.hold_s, 2.0))
        await stage.start_trainer()


async def trainer_paused(stage: Stage, plan: Plan) -> None:
    """SIGSTOP past its lease, then SIGCONT: workers stop taking its groups, and go on when it is back."""
    trainer = stage.trainer
    assert trainer is not None
    if await stage.logged(plan.at):
        stage.struck()
        with stage.disturbance():
            trainer.signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_S * 1.3 + min(plan.hold_s, 2.0))
            trainer.signal(signal.SIGCONT)


async def trainer_left(stage: Stage, plan: Plan) -> None:
    """It dies and never comes back."""
    trainer = stage.trainer
    assert trainer is not None
    await stage.progress.until(lambda: trainer.gone or stage.progress.over)
    stage.trainer_gone = not stage.progress.over


async def scaled(stage: Stage, plan: Plan) -> None:
    """One more instance, and one that is drained, in the middle of a batch."""
    if not await stage.logged(plan.at):
        return
    victim = _victim(stage, plan)
    shard = victim.name.split("/")[0]
    await stage.add_worker(f"{shard}/9")
    await stage.write_run()
    await stage.progress.until(lambda: victim.up or victim.gone)
    stage.struck(victim.held)
    with victim.hindered():
        victim.signal(signal.SIGTERM)
        await stage.progress.until(lambda: victim.gone or stage.progress.over)


async def mixed(stage: Stage, plan: Plan) -> None:
    """Several faults at once or one after the other."""
    dice = plan.dice("mixed")
    kinds = dice.sample(_MIXABLE, dice.choice([1, 2, 2, 3]))
    groups = max(1, plan.batches[0].groups // 2)
    plans = [
        replace(plan, at=dice.randrange(0, groups), victim=dice.randrange(64), hold_s=dice.choice([0.2, 0.6, 2.0]))
        for _ in kinds
    ]
    strikes = [FAULTS[kind](stage, at) for kind, at in zip(kinds, plans, strict=True)]
    strikes.append(worker_killed(stage, plan))
    if kill_orders(plan)[1] is not None:
        strikes.append(trainer_killed(stage, plan))
    began = now_ms()
    for outcome in await asyncio.gather(*strikes, return_exceptions=True):
        # The driver's own connection may be cut with the others; all else is a mistake of the driver.
        if isinstance(outcome, BaseException) and not isinstance(outcome, (OSError, redis.exceptions.RedisError)):
            raise outcome
        if outcome is not None:
            # What it had broken stayed so until now.
            stage.disturbed.append((began, now_ms()))
    async with stage.control() as control:
        await control.config_set("maxmemory", 0)


FAULTS: dict[str, Fault] = {
    **{f"kill-{point}": worker_killed for point in KILL_POINTS},
    "poison": poisoned,
    "worker-paused": worker_paused,
    "broker-restart": broker_restarted,
    "broker-cut": broker_cut,
    "broker-frozen": broker_frozen,
    "client-kill": connections_killed,
    "net-silent": _network("silent"),
    "net-reset": _network("reset"),
    "net-slow": _network("slow"),
    "maxmemory": memory_full,
    "trainer-killed": trainer_killed,
    "trainer-paused": trainer_paused,
    "trainer-gone": trainer_left,
    "scale": scaled,
    "mixed": mixed,
}
_MIXABLE = [
    "worker-paused",
    "broker-restart",
    "client-kill",
    "net-silent",
    "net-reset",
    "net-slow",
    "maxmemory",
    "scale",
]


def kill_orders(plan: Plan) -> tuple[dict[str, Any], Any]:
    """Kill points that processes carry from their start: per worker label, and the trainer's."""
    dice = plan.dice("orders")
    workers: dict[str, Any] = {}
    trainer = None
    labels = sorted(plan.labels)
    if plan.fault.startswith("kill-"):
        workers[labels[plan.victim % len(labels)]] = [plan.fault.removeprefix("kill-"), plan.kill_count]
    if plan.fault in ("trainer-killed", "trainer-gone"):
        trainer = [dice.choice(["received", "logged"]), plan.at + 1]
    if plan.fault == "mixed":
        workers[labels[dice.randrange(len(labels))]] = [dice.choice(KILL_POINTS), plan.kill_count]
        trainer = [dice.choice(["received", "logged"]), plan.at + 1] if dice.random() < 0.4 else None
    return workers, trainer

"""One schedule from its plan to its outcome: stage, fault, end, verdict. Nothing it started outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.evidence import Evidence
from tests.chaos.faults import FAULTS, kill_orders
from tests.chaos.journal import read_journal
from tests.chaos.plan import ABANDON_S, HARD_LIMIT_S, LEASE_S, Plan
from tests.chaos.stage import Stage
from tests.chaos.verdict import violations


@dataclass
class Outcome:
    """What came of a schedule. `struck` is False when the batch was over before the fault could strike."""

    plan: Plan
    violations: list[str]
    recoveries: list[float]
    seconds: float
    failures: int = 0
    account: str = field(default="", repr=False)

    @property
    def struck(self) -> bool:
        return bool(self.recoveries)


async def run_schedule(plan: Plan) -> Outcome:
    """Play `plan`; raises nothing that a fault can cause."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        stage = Stage(plan, Path(folder))
        found: list[str] = []
        try:
            async with asyncio.timeout(HARD_LIMIT_S):
                found = await _play(stage)
        except TimeoutError:
            found.append(f"not over after {HARD_LIMIT_S:g} s; {await _waiting(stage)}")
        except Exception:  # a mistake of the driver must not leave processes behind, nor count as a promise kept
            found.append(f"the driver failed: {traceback.format_exc()}")
        account = stage.last_words() if found else ""
        await stage.stop()
        found += await asyncio.to_thread(_left_processes, stage)
        failures = sum(line["kind"] == "failure" for line in read_journal(stage.journal_path))
    return Outcome(plan, found, stage.recoveries, time.monotonic() - began, failures, account)


async def _play(stage: Stage) -> list[str]:
    workers, trainer = kill_orders(stage.plan)
    await stage.start(workers, trainer)
    fault = asyncio.create_task(FAULTS[stage.plan.fault](stage, stage.plan))
    end = asyncio.create_task(_abandoned(stage, fault) if stage.plan.fault == "trainer-gone" else stage.finished())
    try:
        done, _ = await asyncio.wait({fault, end}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        # A fault that still waits for its moment when all is over never strikes; one under way mends what it broke.
        await asyncio.wait({fault, end}, return_when=asyncio.ALL_COMPLETED)
        fault.result()
    finally:
        fault.cancel()
        end.cancel()
        await asyncio.gather(fault, end, return_exceptions=True)
    return await _judge(stage)


async def _abandoned(stage: Stage, fault: asyncio.Task[None]) -> None:
    """A trainer that is gone: its groups are dropped within a bound, and no worker goes on with them."""
    await fault
    if not stage.trainer_gone:
        return
    began = time.monotonic()
    async with stage.control() as control:
        while any([await control.xlen(stage.keys.groups(shard.name)) for shard in stage.plan.shards]):
            await asyncio.sleep(0.05)
            if time.monotonic() - began > ABANDON_S + 4 * LEASE_S + 5:
                stage.complaints.append(
                    "groups of a trainer that is gone are still on their streams, long after abandon_after_s"
                )
                break
    await stage.progress.until(lambda: not any(worker.held for worker in stage.workers.values()))
    stage.recoveries.append(time.monotonic() - began)


async def _judge(stage: Stage) -> list[str]:
    assert stage.trainer is not None
    found = [f"the trainer ended with {error}" for error in stage.progress.errors]
    if not await stage.trainer.wait(20):
        found.append("the trainer did not end within 20 s of its last batch")
    elif stage.trainer.code not in (0, -9):
        found.append(f"the trainer ended with status {stage.trainer.code}")
    await stage.end_workers()
    async with stage.control() as control:
        evidence = await _evidence(stage, control)
    return [*found, *stage.complaints, *violations(evidence)]


async def _evidence(stage: Stage, control: Any) -> Evidence:
    raw: list[Any] = await control.xrange(stage.keys.events)
    events = [_event(*entry) for entry in raw]
    keys: dict[str, tuple[str, int, int]] = {}
    for key in await control.keys("*"):
        kind: str = (await control.type(key)).decode()
        length = await control.xlen(key) if kind == "stream" else -1
        keys[key.decode()] = (kind, await control.pttl(key), length)
    return Evidence(
        stage.plan, read_journal(stage.journal_path), events, keys, stage.trainer_crashed, stage.trainer_gone,
        stage.data_lost, stage.witnesses(), [*stage.disturbed, *stage.away()],
    )  # fmt: skip


def _event(entry: bytes, fields: dict[bytes, bytes]) -> dict[str, str]:
    """An entry's id begins with the time at which the broker wrote it."""
    named = {name.decode(): value.decode() for name, value in fields.items()}
    return {"at": entry.decode().split("-")[0], **named}


async def _waiting(stage: Stage) -> str:
    """What the broker says of the groups that are still out; the product's own words stand in the trainer's log."""
    with contextlib.suppress(Exception):
        async with stage.control() as control:
            words: list[str] = []
            for key in await control.keys("*batch:*"):
                fields: dict[bytes, bytes] = await control.hgetall(key)
                out = [
                    f"{name.decode()}={value.decode()}"
                    for name, value in fields.items()
                    if name[:2] == b"g:" and not value.startswith((b"done", b"handed", b"failed"))
                ]
                words.append(f"{key.decode()} state {fields.get(b'state', b'?').decode()} still out: {out[:6]}")
            return "; ".join(words) or "no batch is on the broker"
    return "the broker does not answer"


def _left_processes(stage: Stage) -> list[str]:
    """Whatever this schedule started, its broker and that one's supervisor included, that still runs."""
    _, alive = psutil.wait_procs(stage.processes(), timeout=5)
    left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    return [f"process {process.pid} was left behind: {' '.join(process.cmdline())[:200]}" for process in left]

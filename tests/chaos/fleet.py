"""`python -m tests.chaos.fleet [--schedules N] [--seed X] [--only KIND] [--report FILE]`, see README.md.

Operations on a real fleet: one simulated cluster for all schedules of a run; a broker, a fleet and a trainer in this
process for each. After each the verdict of the other chaos driver is asked, and that nothing of the fleet is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import psutil
from rolloutbus.broker.errors import RolloutBusError

from tests.chaos.evidence import Evidence
from tests.chaos.fleet_asking import ASKED
from tests.chaos.fleet_faults import FAULTS
from tests.chaos.fleet_nodes import Nodes, ray, simulated_cluster
from tests.chaos.fleet_plan import KINDS, ONE_NODE_EACH, FleetPlan, Operation, make_fleet_plan
from tests.chaos.fleet_stage import FleetStage, Strike, in_thread, instance_pids, instance_processes
from tests.chaos.report import conclude
from tests.chaos.stage import RUN
from tests.chaos.trainer_process import Trainer
from tests.chaos.verdict import violations

HARD_LIMIT_S = 90.0
SETTLE_S = 25.0
SHUTDOWN_S = 60.0
OPERATIONS = {**FAULTS, **ASKED}
REASON_CHARS = 80
ENDED = ("done", "handed", "failed")
HEADER = (
    "| operation | schedules | struck | refused | violated "
    "| took median | took max | recovery median | recovery max |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class FleetTrainer(Trainer):
    """The chaos trainer in the driver's own process; its journal is kept in memory."""

    def __init__(self, stage: FleetStage, folder: Path) -> None:
        plan = stage.plan
        super().__init__(
            {
                "url": stage.broker.url, "run": RUN, "shards": [shard.name for shard in plan.shards],
                "journal": str(folder / "unused.jsonl"), "settings": plan.settings, "kill_at": None,
                "delay_s": plan.trainer_delay_s, "batches": [batch.order for batch in plan.batches],
            }
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self._progress = stage.progress

    def _note(self, kind: str, **words: Any) -> None:
        self.lines.append({"kind": kind, **words})
        self._progress.note(self.lines[-1])

    def _tell(self, kind: str, **words: Any) -> None:
        """Nobody waits for it."""

    async def run(self) -> None:
        try:
            await super().run()
        except RolloutBusError as error:
            self._note("error", error=f"{type(error).__name__}: {error}")


@dataclass
class FleetOutcome:
    """What came of a schedule."""

    fleet_plan: FleetPlan
    violations: list[str]
    strikes: list[Strike]
    seconds: float
    only: Sequence[str] = ()
    account: str = field(default="", repr=False)


class Words(logging.Handler):
    """The product's own words of one schedule, for whoever looks for the cause of a violation."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        product = logging.getLogger("rolloutbus")
        product.addHandler(self)
        product.setLevel(logging.INFO)
        product.propagate = False
        try:
            yield
        finally:
            product.removeHandler(self)


async def run_schedule(fleet_plan: FleetPlan, nodes: Nodes) -> FleetOutcome:
    """Play one schedule; nothing it started outlives it, and the nodes that it lost are replaced."""
    began, since, words = time.monotonic(), time.time(), Words()
    with tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as folder, words.listening():
        stage = FleetStage(fleet_plan, Path(folder), nodes)
        found: list[str] = []
        try:
            async with asyncio.timeout(HARD_LIMIT_S):
                found = await _play(stage, Path(folder))
        except TimeoutError:
            found = [f"not over after {HARD_LIMIT_S:g} s; {await _waiting(stage)}", *stage.complaints]
        except Exception:  # a mistake of the driver must not leave processes behind, nor count as a promise kept
            found = [f"the driver failed: {traceback.format_exc()}", *stage.complaints]
        finally:
            await _clean_up(stage)
            nodes.fill()
    lines = [*words.lines[-80:], *_instances_said(nodes.folder, since)] if found else []
    account = "\n".join(f"    {line}" for line in lines)
    return FleetOutcome(fleet_plan, found, stage.strikes, time.monotonic() - began, account)


async def _play(stage: FleetStage, folder: Path) -> list[str]:
    await stage.start()
    trainer = FleetTrainer(stage, folder)
    strikes = [_strike(stage, operation) for operation in stage.fleet_plan.operations]
    tasks = [asyncio.create_task(work) for work in (trainer.run(), *strikes)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return await _judge(stage, trainer)


async def _strike(stage: FleetStage, operation: Operation) -> None:
    """Wait for the moment and do it; nothing happens where the batch was over before."""
    if await stage.logged(operation.at):
        await OPERATIONS[operation.kind](stage, operation)


async def _judge(stage: FleetStage, trainer: FleetTrainer) -> list[str]:
    found = [f"the trainer ended with {error}" for error in stage.progress.errors]
    if stage.fleet_plan.settles:
        found += await _unsettled(stage)
    found += await _shut_down(stage)
    return [*found, *stage.complaints, *violations(await _evidence(stage, trainer.lines))]


async def _unsettled(stage: FleetStage) -> list[str]:
    """What of the fleet is not as the operations left it, when there was time enough for whatever was killed."""
    deadline = time.monotonic() + SETTLE_S
    # A fleet tells nobody that it has restarted an instance.
    while (wrong := [*_unlike(stage), *_crowded(stage), *await _unpublished(stage)]) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return [f"{words}, {SETTLE_S:g} s after the last batch" for words in wrong]


def _unlike(stage: FleetStage) -> Iterator[str]:
    processes, known = instance_pids(), stage.running.status()
    for status in known:
        if status.state != "running" or status.pid not in processes:
            yield f"instance {status.label} is {status.state}, its process is {_state_of(status.pid, processes)}"
    if strangers := processes - {status.pid for status in known}:
        yield f"processes {sorted(strangers)} are no instance's"
    for shard, labels in stage.running.labels.items():
        if shard not in stage.blurred and len(labels) != stage.expected[shard]:
            yield f"shard {shard} has {labels}, not {stage.expected[shard]} instances"


def _crowded(stage: FleetStage) -> Iterator[str]:
    labels: dict[str, list[str]] = {}
    for status in stage.running.status():
        labels.setdefault(status.node, []).append(status.label)
    if stage.fleet_plan.strategy == ONE_NODE_EACH:
        yield from (f"{' and '.join(crowd)} are on one node" for crowd in labels.values() if len(crowd) > 1)


def _state_of(pid: int, processes: set[int]) -> str:
    return "unknown" if not pid else f"{pid}" if pid in processes else f"{pid}, which is gone"


async def _unpublished(stage: FleetStage) -> list[str]:
    async with stage.control() as control:
        records: dict[bytes, bytes] = await control.hgetall(stage.keys.shards)
        requests: dict[bytes, bytes] = await control.hgetall(stage.keys.fleet_requests)
    published = {name.decode(): json.loads(record)["labels"] for name, record in records.items()}
    known = stage.running.labels
    found = [] if published == known else [f"the broker knows the instances {published}, the fleet has {known}"]
    return [*found, f"requests that are answered are left: {requests}"] if requests else found


async def _shut_down(stage: FleetStage) -> list[str]:
    try:
        async with asyncio.timeout(SHUTDOWN_S):
            await in_thread(stage.running.shutdown)
    except TimeoutError:
        return [f"the fleet did not shut down within {SHUTDOWN_S:g} s"]
    except RolloutBusError as error:
        return [f"the fleet's shutdown ended with {error}", *await _left_behind(stage.nodes)]
    return await _left_behind(stage.nodes)


async def _left_behind(nodes: Nodes) -> list[str]:
    """Processes of instances that still run, and places that Ray has not got back."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, [*instance_processes(), *nodes.orphans], 5)
    left = [f"process {process.pid} of an instance was left behind" for process in alive]
    deadline = time.monotonic() + 5
    # Ray's books follow its processes by a moment.
    while (free := ray.available_resources().get("CPU", 0)) != nodes.cpus and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return left if free == nodes.cpus else [*left, f"{free:g} of {nodes.cpus} CPUs are free again"]


async def _evidence(stage: FleetStage, journal: list[dict[str, Any]]) -> Evidence:
    keys: dict[str, tuple[str, int, int]] = {}
    async with stage.control() as control:
        raw: list[Any] = await control.xrange(stage.keys.events)
        for key in await control.keys("*"):
            kind: str = (await control.type(key)).decode()
            length = await control.xlen(key) if kind == "stream" else -1
            keys[key.decode()] = (kind, await control.pttl(key), length)
    events = [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in raw]
    return Evidence(stage.plan, journal, events, keys, trainer_crashed=False, trainer_gone=False, data_lost=False)


async def _waiting(stage: FleetStage) -> str:
    """What is under way, the fleet's own view, and what the broker says of the groups that are still out."""
    under_way = [at.what for at in stage.strikes if at.took_s is None]
    instances = [f"{at.label} {at.state}" for at in stage.fleet.status()] if stage.fleet else ["no fleet yet"]
    words = [f"under way: {under_way}; instances: {instances}; {len(stage.progress.logged)} groups logged"]
    with contextlib.suppress(Exception):
        async with stage.control() as control:
            for key in await control.keys("*batch:*"):
                fields: dict[bytes, bytes] = await control.hgetall(key)
                groups = {name.decode(): value.decode() for name, value in fields.items() if name[:2] == b"g:"}
                out = [f"{name}={value}" for name, value in groups.items() if value.split()[0] not in ENDED]
                words.append(f"{key.decode()} state {fields.get(b'state', b'?').decode()} still out: {out[:6]}")
    return "; ".join(words)


async def _clean_up(stage: FleetStage) -> None:
    """End whatever is left, whatever happened."""
    await stage.stop()
    for process in [*instance_processes(), *stage.nodes.orphans]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    stage.nodes.orphans.clear()
    await asyncio.to_thread(stage.broker.stop)


def _instances_said(logs: Path, since: float) -> list[str]:
    """The last words of every process that Ray ran in the meantime."""
    files = [path for path in sorted(logs.glob("session_2*/logs/worker-*.err")) if path.stat().st_mtime >= since]
    words = {path.stem.rpartition("-")[2]: path.read_text("utf-8", "replace").splitlines() for path in files}
    # Lines with a colon in front are Ray's own marks.
    return [f"process {pid}: {line}" for pid, lines in words.items() for line in lines[-12:] if line and line[0] != ":"]


def summary(outcome: FleetOutcome) -> str:
    """One schedule on one line, with what replays it where something is wrong."""
    plan = outcome.fleet_plan.plan
    shards = "+".join(f"{shard.name}×{shard.replicas}" for shard in plan.shards)
    groups = sum(batch.groups for batch in plan.batches)
    what = f"{plan.fault:44} seed {plan.seed}: {outcome.seconds:5.1f} s, {groups} groups on {shards}"
    told = "; ".join(_told(strike) for strike in outcome.strikes) or "not struck"
    if not outcome.violations:
        return f"ok   {what}, {told}"
    wrong = "\n".join(f"    {violation}" for violation in outcome.violations)
    only = "".join(f" --only {kind}" for kind in outcome.only)
    replay = f"    replay: python -m tests.chaos.fleet --seed {plan.seed} --schedules 1{only}"
    return f"FAIL {what}, {told}\n{wrong}\n{replay}\n{outcome.account}"


def _told(strike: Strike) -> str:
    took = f" took {strike.took_s:.2f}" if strike.took_s else ""
    recovery = f" recovery {strike.recovery_s:.2f}" if strike.recovery_s is not None else ""
    refused = f" (refused: {strike.refused[:REASON_CHARS]})" if strike.refused else ""
    return f"{strike.what}{refused}:{took}{recovery}"


def table(outcomes: Sequence[FleetOutcome]) -> str:
    """Markdown, one line per kind of operation, and a sum; a schedule stands in the line of each that it planned."""
    kinds = sorted({operation.kind for outcome in outcomes for operation in outcome.fleet_plan.operations})
    lines = [_line(kind, outcomes) for kind in kinds]
    return "\n".join([HEADER, *lines, _line(None, outcomes)])


def _line(kind: str | None, outcomes: Sequence[FleetOutcome]) -> str:
    mine = [at for at in outcomes if kind is None or any(it.kind == kind for it in at.fleet_plan.operations)]
    strikes = [at for outcome in mine for at in outcome.strikes if kind in (None, at.operation.kind)]
    violated = sum(bool(outcome.violations) for outcome in mine)
    took = _median_and_max([at.took_s for at in strikes if at.took_s])
    recovery = _median_and_max([at.recovery_s for at in strikes if at.recovery_s is not None])
    refused = sum(bool(at.refused) for at in strikes)
    return f"| {kind or '**all**'} | {len(mine)} | {len(strikes)} | {refused} | {violated} | {took} | {recovery} |"


def _median_and_max(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} s | {max(times):.2f} s" if times else "– | –"


async def play(seeds: Sequence[int], only: Sequence[str], nodes: Nodes, out: TextIO) -> list[FleetOutcome]:
    """Play the schedules one after another, telling `out` of each as it ends."""
    outcomes: list[FleetOutcome] = []
    for seed in seeds:
        outcomes.append(replace(await run_schedule(make_fleet_plan(seed, only), nodes), only=only))
        print(summary(outcomes[-1]), file=out, flush=True)
    return outcomes


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.fleet",
        description="Change and break a running fleet, and see that nothing is lost.",
    )
    parser.add_argument("--schedules", type=int, default=25, help="how many schedules to play (default: 25)")
    parser.add_argument("--seed", type=int, help="seed of the first schedule; the next ones count on from it")
    parser.add_argument("--only", action="append", choices=KINDS, help="operations of this kind; may be given again")
    parser.add_argument("--report", type=Path, help="write the table to this markdown file")
    return parser.parse_args()


def main() -> int:
    """0 when nothing was violated."""
    given, out = _arguments(), sys.stdout
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    # What Ray says on standard output of processes that died does not belong between the lines there.
    with contextlib.redirect_stdout(sys.stderr), simulated_cluster() as nodes:
        outcomes = asyncio.run(play(range(seed, seed + given.schedules), given.only or (), nodes, out))
    return conclude(table(outcomes), outcomes, seed, given.report)


if __name__ == "__main__":
    sys.exit(main())

"""`run`: the main job in one command: broker, fleet, batch, results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated

import typer

from ...broker.errors import ConfigError, GroupFailedError
from ...broker.routes import route_of
from ...broker.settings import BrokerSettings
from ...collector import GroupFailure
from ...producer import check_rows
from ...producer.rows import shard_of
from .. import RolloutClient
from ..batch import GroupBatch, OnFailure
from . import run_summary
from .config import ConfigPath, ConfiguredRun, Overrides, configured_url, load_config, with_target
from .console import err, out, print_json
from .environment_check import check_before_start, check_routes, config_files
from .fleet_commands import broker_of, running_fleet
from .guard import FAILED
from .interrupts import CANCELLING, Interrupts
from .result_lines import completed_lines, failed_lines
from .results_file import STANDARD, WriteLines, check_writable, opened
from .rows import FileRows, read_rows
from .run_progress import ShardProgress
from .targets import AsJson, BrokerUrl

RowsPath = Annotated[
    str,
    typer.Option(
        "--rows", "-r", metavar="R", help="JSONL, one prompt per line; - reads standard input.", show_default=False
    ),
]
Generations = Annotated[
    int, typer.Option("--num-generations", "-n", metavar="N", min=1, help="Rollouts per prompt.", show_default=False)
]
OutPath = Annotated[
    str,
    typer.Option(
        "--out", "-o", metavar="O", help="Where results go, overwritten; - is standard output.", show_default=False
    ),
]
Expanded = Annotated[
    bool, typer.Option("--expanded", help="The rows are expanded: N lines in a row per prompt.", show_default=False)
]
Failing = Annotated[
    str,
    typer.Option(
        "--on-failure", metavar="yield|raise", help="Go on without a group that failed for good, or end the job."
    ),
]


@dataclass
class Job:
    """One batch to run: where, what, and what came of it so far. `broker_stays` where others may ask it afterwards."""

    settings: BrokerSettings
    run: str
    routes: Mapping[str, str]
    found: FileRows
    num_generations: int
    on_failure: OnFailure
    broker_stays: bool = True
    summary: run_summary.Summary = field(default_factory=run_summary.Summary)

    def shard(self, route: str) -> str:
        return shard_of(route, self.routes, 0)


def run(
    config: ConfigPath,
    rows: RowsPath,
    num_generations: Generations,
    results: OutPath,
    overrides: Overrides = None,
    expanded: Expanded = False,
    on_failure: Failing = "yield",
    broker_url: BrokerUrl = None,
    run_name: ConfiguredRun = None,
    as_json: AsJson = False,
) -> None:
    """Run a batch of prompts through a fleet of environments, from start to end, and write one JSON line per row.

    Starts a local Ray fleet and, unless --broker-url, REDIS_URL or the config names one, a broker; both end with the
    command. Groups are written as they complete, the rows of a group together: _rowidx, agent_ref, reward, instance,
    attempt, result. NaN and the infinities become strings, arrays lists, bytes base64; a failed row has `failure` and
    no reward.

    Exit code: 0 if every group completed, 1 if something failed, 2 for a mistake in command, config or rows, 130 after
    Ctrl-C.

    Example: rolloutbus run -c examples/quickstart.yaml -r examples/rows.jsonl -n 8 -o results.jsonl
    """
    from ...shard_workers.fleet_config import read_fleet_config

    if on_failure not in ("yield", "raise"):
        raise ConfigError(f"--on-failure {on_failure!r} is not known; say yield or raise")
    root = load_config(config, overrides)
    url = configured_url(root, broker_url)
    # All that can be wrong is told before anything is started.
    known = read_fleet_config(with_target(root, url, run_name))
    found = read_rows(rows, num_generations, expanded=expanded)
    with found.told_by_line():
        check_rows(found.rows, num_generations)
    check_writable(results, [config, rows, *config_files(known)])
    each, of_a_group = (found, num_generations) if expanded else (found.every(num_generations), 1)
    check_routes(each, check_before_start(known), of_a_group)
    with (
        Interrupts(CANCELLING) as interrupts,
        broker_of(url) as used,
        running_fleet(with_target(root, used, run_name), interrupts, drain=False) as fleet,
    ):
        job = Job(fleet.broker, fleet.run, fleet.route_map, found, num_generations, on_failure, url is not None)
        job.summary.labels = [label for labels in fleet.labels.values() for label in labels]
        with told_at_the_end(job.summary, as_json=as_json, results=results):
            interrupts.run(lambda: work(job, results))
    if not job.summary.balanced:
        raise typer.Exit(FAILED)


async def work(job: Job, results: str) -> None:
    """Run the batch, writing each group as it comes. Leaving early, for whatever reason, cancels what is out."""
    started = time.monotonic()
    with job.found.told_by_line():
        async with RolloutClient.connect(job.settings.url, run=job.run, settings=job.settings) as bus:
            await _run_on(bus, job, results, started)


async def _run_on(bus: RolloutClient, job: Job, results: str, started: float) -> None:
    # A group that fails is counted and written in any case, before it ends the job.
    batch = bus.run_groups(job.found.rows, job.num_generations, on_failure="yield")
    routes = [route_of(row) for row in job.found.every(job.num_generations).rows]
    job.summary.groups, job.summary.batch = len(routes), batch.id
    try:
        async with batch:
            with opened(results) as write:
                await _collect(job, batch, routes, write)
    finally:
        job.summary.metrics, job.summary.took_s = batch.metrics, time.monotonic() - started


async def _collect(job: Job, batch: GroupBatch, routes: Sequence[str], write: WriteLines) -> None:
    totals, rows = Counter(job.shard(route) for route in routes), job.found.rows
    async with ShardProgress(totals, lambda: batch.waiting_for) as progress:
        async for outcome in batch:
            failure = outcome if isinstance(outcome, GroupFailure) else None
            write(failed_lines(outcome, rows) if isinstance(outcome, GroupFailure) else completed_lines(outcome))
            route = routes[outcome.group_index]
            job.summary.add(outcome, route)
            progress.advance(job.shard(route), failed=failure is not None)
            if failure is not None and job.on_failure == "raise":
                raise _ended_by(failure, job)


def _ended_by(failure: GroupFailure, job: Job) -> GroupFailedError:
    kept = f"; `rolloutbus dead list --run {job.run}` keeps it" if job.broker_stays else ""
    place = job.found.place(failure.row_indices[0])
    return GroupFailedError(f"{place}: {failure.sentence}. Use --on-failure yield to go on without it{kept}")


@contextmanager
def told_at_the_end(summary: run_summary.Summary, *, as_json: bool, results: str) -> Generator[None]:
    """Around a job: its summary, however it ends. What keeps that from being told hides no error of the job's."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            tell(summary, as_json=as_json, results=results)
        raise
    tell(summary, as_json=as_json, results=results)


def tell(summary: run_summary.Summary, *, as_json: bool, results: str) -> None:
    """The summary, where it does not mix with results on standard output."""
    if not summary.groups:
        return
    aside = results == STANDARD
    if as_json and not aside:
        print_json(summary.as_plain())
    else:
        run_summary.show(summary, console=err if aside else out)

"""`python -m tests.chaos [--schedules N] [--seconds S] [--seed X] [--only FAULT] [--report FILE]`, see README.md."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.plan import make_plan
from tests.chaos.report import conclude, summary, table
from tests.chaos.schedule import Outcome, run_schedule


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Break everything on purpose and see that nothing is lost."
    )
    parser.add_argument("--schedules", type=int, default=200, help="how many schedules to play (default: 200)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no schedule after this many seconds")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the first schedule; the next ones count on from it"
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(FAULTS), help="this fault only; may be given several times"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many schedules at once (default: 1)")
    parser.add_argument("--report", type=Path, help="write the table to this markdown file")
    return parser.parse_args()


async def play(schedules: int, seconds: float, seed: int, faults: list[str], jobs: int) -> list[Outcome]:
    """Play schedules, `jobs` at a time, printing each as it ends."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    seeds = iter(range(seed, seed + schedules))

    async def work() -> None:
        for at in seeds:
            if time.monotonic() - began > seconds:
                return
            outcome = await run_schedule(make_plan(at, faults[at % len(faults)]))
            outcomes.append(outcome)
            print(summary(outcome), flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(work())
    return outcomes


def main() -> int:
    """0 when nothing was violated."""
    given = _arguments()
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    outcomes = asyncio.run(play(given.schedules, given.seconds, seed, given.only or list(FAULTS), given.jobs))
    return conclude(table(outcomes), outcomes, seed, given.report)


if __name__ == "__main__":
    sys.exit(main())

"""One schedule for each kind of fault, about 90 s together; `python -m tests.chaos` plays the long run.

`CHAOS_SEED` plays others than those that are always played.
"""

from __future__ import annotations

import os

import pytest

from tests.chaos.faults import FAULTS, kill_orders
from tests.chaos.plan import make_plan
from tests.chaos.report import summary
from tests.chaos.schedule import run_schedule

SEED = int(os.environ.get("CHAOS_SEED", "7"))
SHORT = (
    "kill-read",
    "kill-written",
    "poison",
    "worker-paused",
    "broker-restart",
    "broker-cut",
    "net-silent",
    "maxmemory",
    "trainer-killed",
    "mixed",
)


@pytest.mark.parametrize("fault", SHORT)
async def test_a_schedule_keeps_every_promise(fault: str) -> None:
    outcome = await run_schedule(make_plan(SEED, fault))
    assert not outcome.violations, summary(outcome)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seed_gives_the_same_plan_again(fault: str) -> None:
    first, again = make_plan(SEED, fault), make_plan(SEED, fault)
    assert first == again
    assert kill_orders(first) == kill_orders(again)
    assert first != make_plan(SEED + 1, fault)

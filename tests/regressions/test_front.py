"""Errors that other systems kept to themselves come to the front, as errors with a type."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rolloutbus.broker.errors import GroupFailedError
from rolloutbus.shard_workers import ShardWorker, WorkerSettings

from tests.regressions.arena import RUN, SHARD, Arena, Environment, completed, rows_of


class LosesItsDuty(ShardWorker):
    """A worker in which one background task ends with an error that nobody expected."""

    async def _claim_for_ever(self) -> None:
        await asyncio.sleep(0.05)
        raise ZeroDivisionError("a bug in a background task")


async def test_an_error_in_a_background_task_of_a_worker_ends_it_with_that_error(arena: Arena) -> None:
    """The task that took jobs over died of a typo. The worker went on, healthy by every probe, and never took
    anything over again; the exception was printed when the process ended, two weeks later. A duty that ends ends the
    worker, with its error.
    """
    worker = LosesItsDuty(arena.settings, RUN, SHARD, "s/0", Environment(), WorkerSettings())
    async with asyncio.timeout(10):
        with pytest.raises(ZeroDivisionError, match="a bug in a background task"):
            await worker.run()
    assert not arena.control.exists(arena.keys.instance("s/0")), "it signed off all the same"


@pytest.mark.parametrize("nothing", [None, 0, "", [1]])
async def test_an_environment_that_returns_no_result_is_a_typed_error(arena: Arena, nothing: Any) -> None:
    """A handler forgot its return statement. None was pickled, stored, fetched and trained on as a reward of zero.
    What is no result is the environment's breach of contract, and the row says so.
    """
    arena.worker("s/0", Environment(lambda row: nothing))
    async with arena.client() as client:
        with pytest.raises(GroupFailedError, match=r"EnvironmentContractError.*must be a dict"):
            await completed(client.run_groups(rows_of(1, 1), 1))

"""A forked process has the objects of its parent and none of its threads: it is told so, and does not wait.

Run by `test_forks.py` in a process of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

from rolloutbus.trainer import NemoRLEnvironment, RolloutClient

from tests.stacks import EachRow, Gates, Stack, check_groups, groups_of, rows_of, within

CHILD_ENDS_WITHIN_S = 10.0
# What a child says that ended in any other way than by saying something.
SILENT = "silent"


def in_a_fork(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What `work` gives in a forked child, or its error's name and words."""
    with warnings.catch_warnings():
        # Newer Pythons warn of what is under test here.
        warnings.simplefilter("ignore", DeprecationWarning)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_child, args=(work, theirs))
        child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(CHILD_ENDS_WITHIN_S) else SILENT
    except EOFError:
        return SILENT
    finally:
        child.kill()
        child.join()


def incarnation_of(client: RolloutClient) -> str:
    return client._engine.incarnation  # pyright: ignore[reportPrivateUsage]


def _child(work: Callable[[], Coroutine[Any, Any, Any]], pipe: Any) -> None:
    try:
        pipe.send(asyncio.run(work()))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    pipe.close()
    # The rest of the tests is the parent's.
    os._exit(0)


@within(60)
async def test_a_forked_process_is_told_that_client_and_batch_are_its_parents(stack: Stack) -> None:
    """Iterating over the batch waited for ever, without a word."""
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    client = await stack.connected()
    async with client.run_groups(rows_of(4), 2) as batch:
        gates.open(0)
        first = await anext(batch)

        async def begin_another() -> None:
            client.run_groups(rows_of(1), 2)

        for work in (
            lambda: groups_of(batch), lambda: client.resume(batch.id), begin_another, client.__aenter__,
        ):  # fmt: skip
            said = await asyncio.to_thread(in_a_fork, work)
            assert said.startswith("ClosedError: this client belongs to the process that this one was forked from")
        for work in (batch.cancel, client.close):
            assert await asyncio.to_thread(in_a_fork, work) is None
        gates.open(1, 2, 3)
        check_groups([first, *await groups_of(batch)], 4)


@within(60)
async def test_a_client_that_was_not_used_before_the_fork_serves_the_child(stack: Stack) -> None:
    await stack.worker()
    client = stack.client()

    async def use() -> tuple[int, str]:
        async with client, client.run_groups(rows_of(3), 2) as batch:
            return len(await groups_of(batch)), incarnation_of(client)

    groups, owner = await asyncio.to_thread(in_a_fork, use)
    assert groups == 3
    # Used on both sides at once, one of them is refused the name.
    assert owner != incarnation_of(client)


@within(60)
async def test_the_adapter_begins_anew_in_a_forked_process(stack: Stack) -> None:
    gates = Gates()
    await stack.worker(EachRow(gates.rollout))
    environment = NemoRLEnvironment(
        stack.broker.url, run=stack.run, num_generations=2, settings=stack.options, fleet_wait_s=5
    )
    call = environment.run_rollouts.options(num_returns="streaming").remote
    stream = call(rows_of(1))
    await stack.happens("taken", 1)

    async def read(rows: Any) -> list[int]:
        return [(await item)[0] async for item in rows]

    said = await asyncio.to_thread(in_a_fork, lambda: read(stream))
    assert said.startswith("ClosedError: these rollouts belong to the process")

    async def call_again() -> list[int]:
        try:
            return await read(call(rows_of(1)))
        finally:
            environment.shutdown()

    gates.open(0)
    assert sorted(await asyncio.to_thread(in_a_fork, call_again)) == [0, 1]
    assert sorted(await read(stream)) == [0, 1]
    await asyncio.to_thread(environment.shutdown)

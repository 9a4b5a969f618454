"""The adapter's connection: made beside the caller's event loop, and made again once it has ended."""

from __future__ import annotations

import asyncio

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ClosedError
from rolloutbus.trainer import NemoRLEnvironment

from tests.stacks import EachRow, Stack, stack_on, until, within
from tests.trainer.test_nemo_rl import PREFIX, SIZE, Rollouts, adapter, batch_of, drive


async def connecting(stack: Stack, environment: NemoRLEnvironment) -> asyncio.Task[int]:
    """A call that waits for a fleet, once its client has its name and looks for one."""
    call = asyncio.create_task(count(environment))
    await until(lambda: stack.redis.keys(f"{stack.keys.prefix}*owner*"))
    return call


async def count(environment: NemoRLEnvironment) -> int:
    return len(await drive(environment, batch_of(1)))


@within(30)
async def test_calls_and_looks_return_at_once_while_another_connects(stack: Stack) -> None:
    """They waited for the connection's lock in the caller's loop, up to a minute where no fleet was there yet."""
    stack.redis.delete(stack.keys.routes, stack.keys.shards)
    environment = adapter(stack)
    first = await connecting(stack, environment)
    # Only when these have returned is there a fleet.
    stream = environment.run_rollouts.remote(batch_of(1), None, PREFIX)
    look = asyncio.ensure_future(environment.health_check.remote())
    await asyncio.sleep(0)
    assert not first.done()
    stack.host()
    await stack.worker(EachRow(Rollouts().rollout))
    assert await first == len([await ready async for ready in stream]) == SIZE
    await look
    assert len(stack.redis.keys(f"{stack.keys.prefix}*owner*")) == 1
    environment.shutdown()


@within(30)
async def test_shutting_down_while_it_connects_ends_the_call_and_waits_for_no_fleet(stack: Stack) -> None:
    stack.redis.delete(stack.keys.routes, stack.keys.shards)
    environment = adapter(stack, fleet_wait_s=600)
    first = await connecting(stack, environment)
    environment.shutdown()
    with pytest.raises(ClosedError):
        await first


@within(60)
@pytest.mark.parametrize("name", [None, "mine"])
async def test_a_call_after_the_client_has_ended_makes_a_new_one(name: str | None) -> None:
    """The ended one was kept: each retry of a `ConnectionError` was told to make a new one, for ever."""
    with EmbeddedBroker() as broker:
        async with stack_on(broker, reconnect_timeout_s=0.5) as stack:
            stack.host()
            environment = adapter(stack, client=name)
            calls = [asyncio.create_task(count(environment))]
            await stack.happens("published")
            broker.kill()
            with pytest.raises(ConnectionError):
                await calls[0]
            with pytest.raises(ConnectionError):
                await environment.health_check.remote()
            broker.restart()
            stack.host()
            await stack.worker(EachRow(Rollouts().rollout))
            await environment.health_check.remote()
            assert await count(environment) == SIZE
            environment.shutdown()

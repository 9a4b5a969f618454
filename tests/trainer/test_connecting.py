"""How a client begins and ends: the broker, its name, its fleet, and what is said when one is missing."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import pytest
from rolloutbus.broker.client_transitions import ClientTransitions
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import (
    BrokerAuthError,
    BrokerUnavailableError,
    ClientNameTakenError,
    ClosedError,
    NoInstanceError,
)
from rolloutbus.trainer import RolloutClient, naming

from tests.stacks import (
    Stack,
    rows_of,
    stack_on,
    until,
    within,
)


@within(20)
async def test_a_second_process_under_the_same_name_is_refused_until_the_first_leaves(stack: Stack) -> None:
    async with stack.client():
        with pytest.raises(ClientNameTakenError, match=r"client 'trainer' of run .* belongs to another live process"):
            async with stack.client():
                pass
        async with stack.client(client="validation"):
            pass
    async with stack.client():
        pass


@within(20)
async def test_waiting_for_a_name_gets_it_when_it_is_given_up(stack: Stack) -> None:
    first = stack.client()
    await first.__aenter__()
    second = stack.client(name_wait_s=10.0)
    entering = asyncio.create_task(second.__aenter__())
    await stack.watch.ping()
    await first.close()
    await entering
    await second.close()


@within(20)
async def test_a_broker_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(BrokerUnavailableError, match=r"redis://127\.0\.0\.1:1") as caught:
        async with RolloutClient.connect("redis://127.0.0.1:1", run="r"):
            pass
    assert isinstance(caught.value, ConnectionError)


@within(20)
async def test_a_wrong_password_is_told_without_telling_it() -> None:
    with EmbeddedBroker(tcp=True, password="right") as server:
        url = server.url.replace("right", "wrong-one")
        with pytest.raises(BrokerAuthError) as caught:
            async with RolloutClient.connect(url, run="r"):
                pass
    assert "wrong-one" not in str(caught.value)


@within(20)
async def test_without_a_fleet_the_wait_ends_by_name_and_a_second_try_may_follow_at_once(
    broker: EmbeddedBroker,
) -> None:
    async with stack_on(broker) as stack:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(NoInstanceError, match=f"run '{stack.run}' within 0.2 s"):
                async with stack.client(fleet_wait_s=0.2):
                    pass
            assert time.monotonic() - began < 5
        stack.host()
        async with stack.client():
            pass


@within(20)
async def test_giving_up_on_a_connection_ends_its_thread_and_frees_its_name(broker: EmbeddedBroker) -> None:
    async with stack_on(broker) as stack:
        client = stack.client(fleet_wait_s=60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.__aenter__(), 0.2)
        await client.close()
        stack.host()
        async with stack.client():
            pass


@within(20)
async def test_a_client_keeps_its_name_while_it_waits_for_a_fleet(broker: EmbeddedBroker) -> None:
    """It had it for one lease; a second process got in, and one of them ended in the middle of a batch."""
    async with stack_on(broker, lease_s=0.5) as stack:
        client = stack.client(fleet_wait_s=60)
        entering = asyncio.create_task(client.__aenter__())
        await until(lambda: stack.redis.exists(stack.keys.owner("trainer")))
        incarnation, first = stack.redis.get(stack.keys.owner("trainer")).split()
        await until(lambda: int(stack.redis.get(stack.keys.owner("trainer")).split()[1]) > int(first) + 600)
        assert stack.redis.get(stack.keys.owner("trainer")).split()[0] == incarnation
        stack.host()
        await entering
        await client.close()


@within(20)
async def test_a_closed_client_says_so(stack: Stack) -> None:
    client = stack.client()
    async with client:
        pass
    await client.close()
    with pytest.raises(ClosedError):
        client.run_groups(rows_of(1), 2)


@within(20)
async def test_a_name_whose_process_died_is_waited_for_by_default(stack: Stack) -> None:
    owner = stack.keys.owner("trainer")
    async with stack.client():
        left_behind = stack.redis.get(owner)
    # As a process leaves it that is killed: the lease stands and nobody renews it.
    stack.redis.set(owner, left_behind)
    async with stack.client():
        assert stack.redis.get(owner).split()[0] != left_behind.split()[0]


@within(20)
async def test_a_wait_for_a_name_is_told_with_how_long_it_takes_at_most(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that ended without closing its client, and was started again, did nothing for half a minute and said
    nothing.
    """
    monkeypatch.setattr(naming, "SAY_AFTER_S", 0.0)
    owner = stack.keys.owner("trainer")
    async with stack.client():
        left_behind = stack.redis.get(owner)
    stack.redis.set(owner, left_behind)
    async with stack.client():
        pass
    (told,) = [record for record in caplog.records if record.name == "rolloutbus.trainer"]
    assert told.levelname == "WARNING"
    assert re.search(r"client trainer of run .* waiting for its lease to end, 1 s at most", told.message)


@within(20)
async def test_a_name_that_is_free_is_not_talked_about(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    async with stack.client():
        pass
    assert caplog.records == []


@within(20)
async def test_a_client_given_up_before_it_knows_that_it_has_its_name_gives_it_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker had noted the name and the answer was on its way: it stayed taken for a whole lease."""
    taken = threading.Event()
    own = ClientTransitions.own

    async def own_and_hear_nothing(self: ClientTransitions, **options: Any) -> int:
        await own(self, **options)
        taken.set()
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(ClientTransitions, "own", own_and_hear_nothing)
    client = stack.client()
    entering = asyncio.create_task(client.__aenter__())
    await asyncio.to_thread(taken.wait, 10)
    assert stack.redis.exists(stack.keys.owner("trainer"))
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    await client.close()
    assert not stack.redis.exists(stack.keys.owner("trainer"))

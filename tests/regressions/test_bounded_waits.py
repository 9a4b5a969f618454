"""A broker that accepts connections and never answers: each wait of the product on the network ends in time, naming
the address.

Either the broker never answered at all, or it fell silent after it had. `LIMIT_S` is far beyond what the settings
below add up to.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.channel import Channel, Link
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.inspection import inspect_run
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers import ShardWorker, WorkerSettings
from rolloutbus.trainer import RolloutClient

from tests.chaos.proxy import Proxy
from tests.regressions.arena import RUN, SHARD, Arena, Environment, arena_on, rows_of

LIMIT_S = 12.0
TIMES: dict[str, Any] = {
    "lease_s": 0.6,
    "renew_every_s": 0.1,
    "connect_timeout_s": 0.4,
    "command_timeout_s": 0.5,
    "reconnect_timeout_s": 1.5,
    "block_s": 0.2,
}


@pytest.fixture
async def deaf() -> AsyncIterator[str]:
    """The address of a server that accepts and never answers."""
    gone = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.transport.abort()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    gone.set()
    server.close()
    await asyncio.sleep(0)


@pytest.fixture
async def silenced(tmp_path: Path) -> AsyncIterator[tuple[Arena, Proxy]]:
    """A broker behind a proxy that can fall silent."""
    async with arena_on(tmp_path, tcp=True, **TIMES) as arena:
        proxy = Proxy(arena.broker.url, random.Random(1))
        await proxy.start()
        yield arena, proxy
        proxy.heal()
        await arena.end()
        await proxy.stop()


async def _ends_naming(address: str, wait: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RolloutBusError) as caught:
            await wait()
    assert address in str(caught.value)


def _address(proxy: Proxy) -> str:
    return proxy.url.rsplit("@", 1)[1]


async def test_opening_a_channel_ends(deaf: str) -> None:
    await _ends_naming(deaf, lambda: Channel.open(BrokerSettings(url=f"redis://{deaf}", **TIMES), "test"))


async def test_connecting_a_client_ends(deaf: str) -> None:
    client = RolloutClient.connect(f"redis://{deaf}", run=RUN, settings=TIMES)
    await _ends_naming(deaf, client.__aenter__)
    await client.close()


async def test_connecting_from_plain_code_ends(deaf: str) -> None:
    client = RolloutClient.connect(f"redis://{deaf}", run=RUN, settings=TIMES)
    await _ends_naming(deaf, lambda: asyncio.to_thread(client.connect_now))
    await client.close()


async def test_starting_a_worker_ends(deaf: str) -> None:
    settings = BrokerSettings(url=f"redis://{deaf}", **TIMES)
    worker = ShardWorker(settings, RUN, SHARD, "s/0", Environment(), WorkerSettings())
    await _ends_naming(deaf, worker.run)


async def test_stopping_a_worker_that_never_got_through_ends(deaf: str) -> None:
    settings = BrokerSettings(url=f"redis://{deaf}", **TIMES)
    worker = ShardWorker(settings, RUN, SHARD, "s/0", Environment(), WorkerSettings())
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    worker.stop()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait({task})
    assert task.done()
    task.exception()


async def test_inspection_ends(deaf: str) -> None:
    link = Link(BrokerSettings(url=f"redis://{deaf}", **TIMES), "status")
    await _ends_naming(deaf, lambda: inspect_run(link, RUN))
    await link.close()


async def test_a_batch_on_a_broker_that_fell_silent_ends(silenced: tuple[Arena, Proxy]) -> None:
    arena, proxy = silenced
    client = arena.client(proxy.url)
    async with asyncio.timeout(LIMIT_S):
        await client.__aenter__()
        batch = client.run_groups(rows_of(4, 2), 2)
        proxy.misbehave("silent")
        await _ends_naming(_address(proxy), lambda: anext(batch))
        await client.close()


async def test_running_groups_on_a_broker_that_fell_silent_ends(silenced: tuple[Arena, Proxy]) -> None:
    arena, proxy = silenced
    client = arena.client(proxy.url)
    await client.__aenter__()
    proxy.misbehave("silent")

    async def run() -> None:
        async with client.run_groups(rows_of(4, 2), 2) as batch:
            async for _ in batch:
                pass

    await _ends_naming(_address(proxy), run)
    async with asyncio.timeout(LIMIT_S):
        await client.close()


async def test_resuming_on_a_broker_that_fell_silent_ends(silenced: tuple[Arena, Proxy]) -> None:
    arena, proxy = silenced
    client = arena.client(proxy.url)
    await client.__aenter__()
    proxy.misbehave("silent")
    await _ends_naming(_address(proxy), lambda: client.resume("0123456789ab"))
    async with asyncio.timeout(LIMIT_S):
        await client.close()


async def test_closing_a_client_of_a_broker_that_fell_silent_ends(silenced: tuple[Arena, Proxy]) -> None:
    arena, proxy = silenced
    client = arena.client(proxy.url)
    await client.__aenter__()
    batch = client.run_groups(rows_of(4, 2), 2)
    proxy.misbehave("silent")
    async with asyncio.timeout(LIMIT_S):
        await client.close()
        with pytest.raises(RolloutBusError, match="closed"):
            await anext(batch)


async def test_stopping_a_worker_of_a_broker_that_fell_silent_ends(silenced: tuple[Arena, Proxy]) -> None:
    arena, proxy = silenced
    rolling = asyncio.Event()

    async def never_ends(row: dict[str, Any]) -> None:
        rolling.set()
        await asyncio.Event().wait()

    worker, task = arena.worker("s/0", Environment(never_ends), url=proxy.url)
    async with arena.client() as client:
        batch = client.run_groups(rows_of(1, 2), 2)
        await rolling.wait()
        proxy.misbehave("silent")
        worker.stop()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({task})
        assert task.done()
        await batch.cancel()

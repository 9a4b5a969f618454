"""The same stage on three brokers: in memory, the embedded Valkey, and the machine's Redis."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
from rolloutbus.broker.channel import Link
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.scripts import SCRIPTS, load_scripts
from rolloutbus.broker.settings import BrokerSettings

from tests.broker.contract.stage import Stage
from tests.servers import FakeRunner

_runs = itertools.count()


async def _play(broker: EmbeddedBroker | None) -> AsyncIterator[Stage]:
    if broker is None:
        runner = FakeRunner()
        await runner.run([("SCRIPT", "LOAD", script.source) for script in SCRIPTS.values()])
        stage = Stage(runner, f"run{next(_runs)}")
        yield stage
        await stage.check_nothing_left()
        return
    link = Link(BrokerSettings(url=broker.url), "contract", load_scripts)
    stage = Stage(link, f"run{next(_runs)}")
    try:
        yield stage
        await stage.check_nothing_left()
    finally:
        await link.close()


@pytest.fixture(params=["fakeredis", "valkey", "redis_7"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """One run of its own; afterwards nothing of its batches is left."""
    broker = None if request.param == "fakeredis" else request.getfixturevalue(request.param)
    async for stage in _play(broker):
        yield stage


@pytest.fixture(params=["valkey", "redis_7"])
async def real_stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """Only real servers, for what fakeredis does otherwise; each use says what that is."""
    async for stage in _play(request.getfixturevalue(request.param)):
        yield stage

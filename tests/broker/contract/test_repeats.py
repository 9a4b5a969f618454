"""Any command may be sent again, at once or much later: nothing counts twice, nothing is lost, nothing is left, nobody
waits for ever.

`REPEATS=5000 pytest tests/broker/contract/test_repeats.py` plays as many other runs on each broker. One that fails is
told in as few steps as it takes.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from rolloutbus.broker.channel import Link
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.settings import BrokerSettings

from tests.broker.contract.repeating import World
from tests.broker.contract.repeating_play import play
from tests.broker.contract.stage import Stage
from tests.servers import FakeRunner

MORE = int(os.environ.get("REPEATS", "0"))


@pytest.mark.timeout(36_000 if MORE else 120)
@pytest.mark.parametrize("kind", ["fakeredis", "valkey", "redis_7"])
def test_whatever_is_sent_again(kind: str, request: pytest.FixtureRequest):
    seed = random.randrange(1 << 40) if MORE else 0
    if kind == "fakeredis":
        play(lambda: World(FakeRunner()), MORE or 20, seed)
        return
    loop = asyncio.new_event_loop()
    link = Link(BrokerSettings(url=request.getfixturevalue(kind).url), "repeats", load_scripts)
    try:
        play(lambda: World(link, loop), MORE or 10, seed)
    finally:
        loop.run_until_complete(link.close())
        loop.close()


async def test_an_attempt_is_renewed_though_its_stream_was_deleted(stage: Stage):
    """Else none of its instance's is, and no cancellation is told, until somebody makes the stream again."""
    await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.raw("DEL", stage.stream)
    assert await stage.renew(worker, attempt) == ["ok"]

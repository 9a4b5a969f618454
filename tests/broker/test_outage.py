"""Waiting for a broker that is away: pauses that grow, and few words."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from rolloutbus.broker.outage import Outage

log = logging.getLogger("rolloutbus.test")
AWAY = ConnectionError("refused")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


async def test_an_outage_is_told_at_once_then_seldom(pauses: list[float], caplog: pytest.LogCaptureFixture):
    outage = Outage(log, "reader:a/0")
    told: list[int] = []
    for at in range(1, 121):
        caplog.clear()
        await outage.pause(AWAY)
        if caplog.messages:
            told.append(at)
            (said,) = caplog.messages
            assert re.fullmatch(r"reader:a/0: waiting for the broker since \d+\.\d s \(refused\)", said)
    assert told == [1, 10, 60, 120]
    assert len(pauses) == 120


async def test_pauses_grow_to_a_second_and_begin_anew_once_it_is_over(pauses: list[float]):
    outage = Outage(log, "collector")
    for _ in range(2000):
        await outage.pause(AWAY)
    assert pauses[0] <= 0.04
    assert 0 < max(pauses) <= 1.0
    assert sum(pauses[100:]) / len(pauses[100:]) > 0.3
    outage.over()
    await outage.pause(AWAY)
    assert pauses[-1] <= 0.04


async def test_it_can_have_begun_before(pauses: list[float], caplog: pytest.LogCaptureFixture):
    await Outage(log, "client:trainer", since=-1e6).pause(AWAY)
    assert float(caplog.messages[0].split("since ")[1].split(" s")[0]) > 1e6
    assert pauses

"""A server that forgot the scripts, and servers that know those of two versions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
from rolloutbus.broker.channel import Command, ReplyError
from rolloutbus.broker.errors import BrokerError
from rolloutbus.broker.scripts import SCRIPTS, Script
from rolloutbus.broker.steps import REPETITIONS, run_step
from rolloutbus.broker.worker_transitions import Acceptance

from tests.broker.contract.stage import ALL, Stage, result_rows


async def test_publishing_is_repeated_and_leaves_no_orphan(stage: Stage):
    batch = await stage.opened(3)
    await stage.raw("SCRIPT", "FLUSH")
    answers = await stage.published(batch)
    assert [answer.status for answer in answers] == ["ok", "ok", "ok"]
    assert await stage.queued() == [answer.entry for answer in answers]
    assert await stage.count(batch, "published") == 3


async def test_accepting_is_repeated_and_leaves_no_orphan(stage: Stage):
    await stage.sealed(2)
    worker = stage.worker()
    attempts = [await stage.taken(worker) for _ in range(2)]
    await stage.raw("SCRIPT", "FLUSH")
    whole = [Acceptance(attempt, [result_rows(0, 1), result_rows(2, 3)], finish=True) for attempt in attempts]
    assert [getattr(answer, "status", answer) for answer in await worker.accept(whole)] == ["ok", "ok"]
    assert [entry.row_indices for entry in await stage.results()] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize("step", ["take", "renew", "claim", "own", "close"])
async def test_a_step_without_entries_is_repeated_too(stage: Stage, step: str):
    batch = await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    await stage.raw("SCRIPT", "FLUSH")
    if step == "take":
        assert (await worker.take(group, "t", observing=True, crash_limit=5)).status == "ok"
    elif step == "renew":
        assert await stage.renew(worker) == []
    elif step == "claim":
        assert (await worker.claim(1, observing=True, peers=())).entries == []
    elif step == "own":
        assert await batch.client.own() == 0
    else:
        assert await batch.close() is not None


class Forgetful:
    """A server that keeps no script, which no repetition can mend."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._runner = stage.runner
        self.calls = 0

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        self.calls += 1
        await self._runner.run([("SCRIPT", "FLUSH")])
        return await self._runner.run(commands)


async def test_a_server_that_keeps_no_script_is_an_error_in_the_end(stage: Stage):
    batch = await stage.opened(1)
    runner = Forgetful(stage)
    batch.client._runner = runner  # pyright: ignore[reportPrivateUsage]
    (answer,) = await batch.client.publish(batch.groups)
    assert isinstance(answer, BrokerError)
    assert "NOSCRIPT" in str(answer)
    assert runner.calls == 2 * (REPETITIONS + 1)
    await stage.runner.run([("SCRIPT", "LOAD", script.source) for script in SCRIPTS.values()])
    batch.client._runner = stage.runner  # pyright: ignore[reportPrivateUsage]
    assert await stage.queued() == []


async def test_a_server_that_takes_no_script_says_so(stage: Stage):
    class Refusing(Forgetful):
        async def run(self, commands: Sequence[Command]) -> list[Any]:
            replies = await super().run(commands)
            return [
                ReplyError("NOPERM no script load") if command[:2] == ("SCRIPT", "LOAD") else reply
                for command, reply in zip(commands, replies, strict=True)
            ]

    with pytest.raises(BrokerError, match="NOPERM"):
        await run_step(Refusing(stage), SCRIPTS["own"].call(["k"], "i", 1, 1, 1))


async def test_two_versions_of_the_product_share_a_broker(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    batch = await stage.sealed(2)
    worker = stage.worker()
    attempt = await stage.taken(worker)
    older = dict(SCRIPTS)
    for name, script in older.items():
        source = script.source + "\n-- a newer version"
        monkeypatch.setitem(SCRIPTS, name, Script(name, source, hashlib.sha1(source.encode()).hexdigest()))
    assert (await stage.finish(worker, attempt)).status == "ok"
    newer = await stage.taken(worker)
    for name, script in older.items():
        monkeypatch.setitem(SCRIPTS, name, script)
    assert (await stage.accept(worker, newer, result_rows(*ALL), finish=True)).status == "ok"
    books = await batch.close()
    assert books is not None
    assert books.completed == 2

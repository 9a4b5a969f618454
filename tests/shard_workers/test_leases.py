"""Renewing from a thread of its own: what is held stays held, what is lost is told, and stopping waits for nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import BrokerError
from rolloutbus.broker.messages import GroupEntry
from rolloutbus.broker.worker_transitions import Attempt, HeldGroup, Identity, WorkerTransitions
from rolloutbus.shard_workers.leases import LeaseKeeper

from tests.stacks import Stack, stack_on, until, within


class Desk:
    """A keeper whose renewals the test answers."""

    def __init__(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renewals: list[list[str]] = []
        self.answers: dict[str, str] = {}
        self.errors: list[Exception] = []
        self.answer_after_s = 0.0
        self.answered = 0
        self.replaced = False
        self.told: list[tuple[str, str]] = []
        self.told_of_replacement = asyncio.Event()
        self.threads: set[int] = set()
        self.told_in: set[int] = set()
        monkeypatch.setattr(WorkerTransitions, "renew", self._renew)
        identity = Identity("s", "s", "i")
        self.keeper = LeaseKeeper(stack.settings, stack.keys, identity, 4, self._on_lost, self.told_of_replacement.set)

    async def _renew(self, held: Sequence[HeldGroup], slots: int, *, observing: bool) -> list[str] | None:
        self.threads.add(threading.get_ident())
        self.renewals.append([group.token for group in held])
        await asyncio.sleep(self.answer_after_s)
        self.answered += 1
        if self.errors:
            raise self.errors.pop()
        return None if self.replaced else [self.answers.get(group.token, "ok") for group in held]

    def _on_lost(self, token: str, status: str) -> None:
        self.told_in.add(threading.get_ident())
        self.told.append((token, status))


@pytest.fixture
def desk(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(stack, monkeypatch)


def attempt(token: str) -> Attempt:
    return Attempt(GroupEntry("1-0", "b", 0, "c", "a", 1, 0, b""), token, 1)


@within(10)
async def test_what_is_held_is_renewed_from_another_thread_until_it_is_forgotten(desk: Desk) -> None:
    desk.keeper.hold(attempt("one"))
    desk.keeper.hold(attempt("two"))
    desk.keeper.start()
    await until(lambda: ["one", "two"] in desk.renewals)
    desk.keeper.forget(attempt("one"))
    await until(lambda: ["two"] in desk.renewals)
    await desk.keeper.stop()
    assert threading.get_ident() not in desk.threads
    assert desk.told == []


@within(10)
async def test_a_lost_lease_is_told_in_the_workers_own_thread(desk: Desk) -> None:
    desk.answers = {"one": "lost", "two": "gone"}
    for token in ("one", "two", "three"):
        desk.keeper.hold(attempt(token))
    desk.keeper.start()
    await until(lambda: len(desk.told) >= 2)
    await desk.keeper.stop()
    assert set(desk.told) == {("one", "lost"), ("two", "gone")}
    assert desk.told_in == {threading.get_ident()}


@within(10)
async def test_another_process_under_the_label_is_told_and_ends_the_renewing(desk: Desk) -> None:
    desk.replaced = True
    desk.keeper.start()
    await desk.told_of_replacement.wait()
    await desk.keeper.stop()
    assert len(desk.renewals) == 1


@pytest.mark.parametrize("error", [BrokerError("refused"), ZeroDivisionError("a bug")])
@within(10)
async def test_an_error_is_told_and_does_not_end_the_renewing(
    desk: Desk, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    desk.errors = [error]
    desk.keeper.hold(attempt("one"))
    with caplog.at_level(logging.WARNING, "rolloutbus.worker"):
        desk.keeper.start()
        await until(lambda: len(desk.renewals) >= 2)
        await desk.keeper.stop()
    assert "s: cannot renew its leases" in caplog.text


@within(10)
async def test_stopping_waits_for_the_answer_to_a_renewal_that_is_under_way(desk: Desk) -> None:
    """Found by chaos: one that a slow network held up came after the sign-off, and the record was there again."""
    desk.answer_after_s = 0.3
    desk.keeper.start()
    await until(lambda: len(desk.renewals) == 1)
    await desk.keeper.stop()
    assert (len(desk.renewals), desk.answered) == (1, 1)


@within(20)
async def test_stopping_does_not_wait_for_a_broker_that_is_away() -> None:
    with EmbeddedBroker() as broker:
        async with stack_on(broker, reconnect_timeout_s=60.0) as stack:
            keeper = LeaseKeeper(stack.settings, stack.keys, Identity("s", "s", "i"), 1, print, lambda: None)
            keeper.start()
            await until(lambda: stack.redis.exists(stack.keys.instance("s")))
            broker.kill()
            await asyncio.sleep(0.5)
            await asyncio.wait_for(keeper.stop(), 2)
            await keeper.stop()
            broker.restart()


@within(10)
async def test_a_keeper_that_was_never_started_stops(desk: Desk) -> None:
    await desk.keeper.stop()
    assert desk.renewals == []

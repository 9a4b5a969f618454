"""Looking after what a batch waits for, against a broker of our own making: who is ended, and what is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from rolloutbus.broker.channel import Command, ReplyError
from rolloutbus.broker.client_transitions import OutgoingGroup
from rolloutbus.broker.errors import BatchCancelledError, BrokerError, NoInstanceError, UnknownBatchError
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.messages import Failure, ForeignEntryError
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.collector import BatchCollection, GroupFailure, PackedGroup, Sink
from rolloutbus.collector import sweep as sweep_module
from rolloutbus.collector.sweep import GroupState, Sweeper, Watched, outline, parse_state

KEYS = Keys("r")
NOW_S = 1_000_000


class Clock:
    """Stands for the monotonic clock, so that a test need not wait."""

    def __init__(self) -> None:
        self.now = 5_000.0

    def monotonic(self) -> float:
        return self.now


class Broker:
    """Plays link and transitions: two groups of two rows on shard `s`, which has one instance."""

    def __init__(self) -> None:
        self.state: str | None = "sealed"
        self.records = {0: record("queued"), 1: record("queued")}
        self.alive = {"s"}
        self.shard: dict[str, Any] = {"replicas": 1, "group_timeout_s": 100.0}
        self.watched = True
        self.length: Any = 2
        self.deleted: set[int] = set()
        self.client = "c"
        self.has_results = True
        self.unread: bytes | None = None
        self.reason: bytes | None = None
        self.doubted: list[tuple[str, ...]] = []
        self.asked: list[tuple[int, str]] = []
        self.expired: list[tuple[int, str]] = []

    def watched_for(self, seconds: float) -> bool:
        return self.watched

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        return [self._reply([str(word) for word in command]) for command in commands]

    def _reply(self, words: list[str]) -> Any:
        if words[0] == "TIME":
            return [str(NOW_S).encode(), b"0"]
        if words[0] == "HMGET":
            groups = [self.records[int(word[2:])] for word in words[5:]]
            return [self.state and self.state.encode(), self.reason, self.unread, *groups]
        if words[0] == "HGETALL":
            return [b"s", json.dumps(self.shard).encode()]
        if words[0] == "EXISTS" and words[1] == KEYS.results("c", "s"):
            return int(self.has_results)
        if words[0] == "EXISTS":
            return int(words[1].removeprefix(KEYS.instance("")) in self.alive)
        assert words == ["XLEN", KEYS.groups("s")], words
        return self.length

    async def make_results(self, shards: Sequence[str]) -> list[str]:
        self.has_results = True
        return list(shards)

    async def forget_unread(self, batch: str, shards: Sequence[str]) -> None:
        assert self.has_results
        self.doubted.append((batch, *shards))

    async def expire(
        self, shard: str, group: OutgoingGroup, entry: str, reason: str, timeout_s: float, failure: Failure
    ) -> str:
        self.asked.append((group.group, reason))
        if reason == "vanished" and group.group not in self.deleted:
            return "early"
        self.expired.append((group.group, reason))
        return "dead"


def record(status: str, *, instance: str = "-", first_take_s: float = 0) -> bytes:
    return f"{status} 1 token {instance} 1-1 0 0 0 10 {int(first_take_s * 1000)}".encode()


class Desk:
    """A sweeper over `Broker` with a clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(sweep_module, "time", self.clock)
        self.broker = Broker()
        self.groups: list[PackedGroup | GroupFailure] = []
        self.errors: list[BaseException] = []
        sink = Sink(self.groups.append, self.errors.append)
        self.collection = BatchCollection("b", [{"n": at} for at in range(4)], 2, ["s", "s"], sink)
        self.collection.last_progress = self.clock.now
        self.watched = Watched(self.collection, lambda at: outline("b", at, "s", "a", 2, 2 * at), {0: "1-1", 1: "1-2"})
        self.settings = BrokerSettings()
        self.taken_in = float("inf")
        self._sweeper = Sweeper(self.settings, KEYS, self.broker, self.broker, lambda _: self.taken_in)  # pyright: ignore[reportArgumentType]

    async def sweep(self, after_s: float = 0.0, of: Watched | None = None) -> None:
        self.clock.now += after_s
        await self._sweeper.sweep(of or self.watched)

    async def sweep_for(self, seconds: float) -> None:
        """Sweep as often as the settings say."""
        for _ in range(int(seconds / self.settings.sweep_every_s)):
            await self.sweep(self.settings.sweep_every_s)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_a_groups_record_is_read_as_the_scripts_write_it() -> None:
    assert parse_state(3, b"running 2 token s/1 17-0 1 0 2 99 123") == GroupState(3, "running", 2, "s/1", "17-0", 123)


def test_a_record_that_somebody_changed_is_named() -> None:
    with pytest.raises(ForeignEntryError, match="group 3 was changed"):
        parse_state(3, b"whatever")


async def test_what_the_broker_refuses_is_an_error_of_ours(desk: Desk) -> None:
    """A key of the wrong type, or a user without the right, ended the whole client with a TypeError."""
    desk.broker.length = ReplyError("WRONGTYPE no stream")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await desk.sweep(after_s=6)


async def test_a_results_stream_that_was_deleted_is_made_again_and_told(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.broker.has_results = False
    await desk.sweep()
    assert desk.broker.has_results
    assert "somebody deleted the stream of shard s's results" in caplog.text
    await desk.sweep()
    assert caplog.text.count("somebody deleted") == 1


@pytest.mark.parametrize(("unread", "doubted"), [(None, []), (b"0", []), (b"7", [("b", "s")]), (b"-7", [("b", "s")])])
async def test_what_counts_as_unread_is_looked_after(
    desk: Desk, unread: bytes | None, doubted: list[tuple[str, ...]]
) -> None:
    """Also on the look that makes a deleted stream again, and not before."""
    desk.broker.unread, desk.broker.has_results = unread, False
    await desk.sweep()
    assert desk.broker.doubted == doubted


async def test_a_shard_without_instances_is_told_once_and_again_when_it_had_one(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """After the crash of a fleet its routes are still there, and a client that came then waited in silence."""
    desk.broker.alive = set()
    await desk.sweep(after_s=1)
    assert caplog.text == ""
    await desk.sweep_for(20)
    assert caplog.text.count("no instance of shard s shows signs of life; its groups wait 600 s") == 1
    desk.broker.alive = {"s"}
    await desk.sweep()
    desk.broker.alive = set()
    await desk.sweep_for(20)
    assert caplog.text.count("no instance of shard s") == 2


async def test_a_batch_that_is_gone_ends_with_an_error(desk: Desk) -> None:
    desk.broker.state = None
    await desk.sweep()
    (error,) = desk.errors
    assert isinstance(error, UnknownBatchError)


async def test_a_batch_that_an_operator_cancelled_ends_though_its_word_found_no_results_stream(desk: Desk) -> None:
    """The stream that would have told was deleted; the batch waited for groups that nobody had any more."""
    desk.broker.state, desk.broker.reason, desk.broker.has_results = "closed", b"wrong rows", False
    await desk.sweep()
    (error,) = desk.errors
    assert isinstance(error, BatchCancelledError)
    assert "wrong rows" in str(error)
    assert not desk.broker.has_results


async def test_a_batch_that_is_not_opened_yet_or_being_brought_back_is_not_gone(desk: Desk) -> None:
    """A sweep between a broker's restart and the batch's return used to end the batch."""
    desk.broker.state = None
    desk.watched.is_there = lambda: False
    await desk.sweep()
    assert desk.errors == []


async def test_a_group_over_its_deadline_is_ended_one_lease_after_its_worker_should_have(desk: Desk) -> None:
    desk.broker.records[0] = record("running", instance="s", first_take_s=NOW_S - 131)
    desk.broker.records[1] = record("delayed", instance="s", first_take_s=NOW_S - 129)
    await desk.sweep()
    assert desk.broker.expired == [(0, "deadline")]


async def test_nobody_is_late_while_the_observer_was_away(desk: Desk) -> None:
    desk.broker.records[0] = record("running", instance="s", first_take_s=1)
    desk.broker.watched = False
    await desk.sweep()
    assert desk.broker.expired == []


async def test_a_shard_without_an_instance_for_long_enough_ends_what_it_has(desk: Desk) -> None:
    """Also what ran there: groups that the last instance took with it used to wait for their deadline."""
    desk.broker.alive.clear()
    desk.broker.records[1] = record("running", instance="s", first_take_s=NOW_S)
    await desk.sweep_for(599)
    assert desk.broker.expired == []
    await desk.sweep_for(11)
    assert desk.broker.expired[:2] == [(0, "no_instance"), (1, "no_instance")]


async def test_an_instance_that_came_back_starts_the_wait_anew(desk: Desk) -> None:
    desk.broker.alive.clear()
    await desk.sweep_for(500)
    desk.broker.alive.add("s")
    await desk.sweep()
    desk.broker.alive.clear()
    await desk.sweep_for(500)
    assert [reason for _, reason in desk.broker.expired if reason == "no_instance"] == []


async def test_absence_that_nobody_looked_at_does_not_count(desk: Desk) -> None:
    """Two batches an hour apart each met the shard while it restarted; the second one's groups were ended at once."""
    desk.broker.alive.clear()
    await desk.sweep()
    await desk.sweep(after_s=3600)
    assert [reason for _, reason in desk.broker.expired if reason == "no_instance"] == []


async def test_a_shard_that_is_lost_for_good_ends_the_batch_with_what_the_fleet_says(desk: Desk) -> None:
    desk.broker.alive.clear()
    desk.broker.shard["lost"] = "its node is gone"
    await desk.sweep()
    (error,) = desk.errors
    assert isinstance(error, NoInstanceError)
    assert "its node is gone" in str(error)


async def test_groups_whose_entries_may_have_been_deleted_are_looked_for_when_it_has_been_quiet(desk: Desk) -> None:
    desk.broker.length, desk.broker.deleted = 1, {1}
    await desk.sweep(after_s=1)
    assert desk.broker.asked == []
    await desk.sweep(after_s=5)
    assert desk.broker.asked == [(0, "vanished"), (1, "vanished")]
    assert desk.broker.expired == [(1, "vanished")]


async def test_in_a_stream_full_of_others_they_are_looked_for_after_a_longer_silence(desk: Desk) -> None:
    desk.broker.length, desk.broker.deleted = 100, {0}
    await desk.sweep_for(60)
    assert desk.broker.asked == []
    await desk.sweep_for(5)
    assert desk.broker.expired == [(0, "vanished")]


async def test_a_group_that_a_live_instance_runs_has_not_vanished(desk: Desk) -> None:
    desk.broker.length, desk.broker.deleted = 0, {0, 1}
    desk.broker.records[0] = record("running", instance="s", first_take_s=NOW_S)
    desk.broker.records[1] = record("running", instance="s/7", first_take_s=NOW_S)
    await desk.sweep(after_s=6)
    assert desk.broker.expired == [(1, "vanished")]


async def test_what_the_broker_does_not_end_is_not_said_to_be_ended(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.broker.length = 1
    with caplog.at_level(logging.ERROR, "rolloutbus.collector"):
        await desk.sweep(after_s=6)
    assert desk.broker.asked
    assert caplog.records == []


async def test_a_group_that_ended_without_results_fails_only_when_they_stay_away(desk: Desk) -> None:
    """After a long silence a group that had ended a moment before was failed, while its results were on their way."""
    await desk.sweep_for(50)
    desk.broker.records[0] = record("done", instance="s")
    await desk.sweep()
    assert desk.groups == []
    await desk.sweep_for(35)
    (failure,) = desk.groups
    assert isinstance(failure, GroupFailure)
    assert (failure.group_index, failure.type, failure.instance) == (0, "ResultsLostError", "s")


async def test_results_that_could_not_be_read_yet_are_not_lost(desk: Desk) -> None:
    """The reading connection could not come back for longer than a lease; whole groups on the stream were failed, as
    deleted by somebody, and then deleted.
    """
    desk.broker.records[0] = record("done", instance="s")
    desk.taken_in = desk.clock.now
    await desk.sweep_for(200)
    assert desk.groups == []
    desk.taken_in = desk.clock.now
    await desk.sweep()
    assert [failure.group_index for failure in desk.groups] == [0]


async def test_a_stall_is_told_by_shard_groups_and_holders_once_a_minute(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.broker.records[0] = record("running", instance="s/3", first_take_s=NOW_S)
    desk.broker.length = 100
    with caplog.at_level(logging.WARNING, "rolloutbus.collector"):
        await desk.sweep_for(125)
    told = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(told) == 2
    assert "shard s (instances alive: s); running: group 0 on s/3 (attempt 1); not taken: 1 group (1)" in told[0]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("parked", "put aside until the consumer takes what has come"),
        ("delayed", "waiting for a retry"),
        ("suspect", "waiting for a last attempt"),
        ("done", "ended, and not read yet"),
    ],
)
async def test_a_stall_says_what_each_group_waits_for(
    desk: Desk, caplog: pytest.LogCaptureFixture, status: str, words: str
) -> None:
    desk.broker.records = {group: record(status, instance="s") for group in range(2)}
    desk.broker.length, desk.taken_in = 100, float("-inf")
    with caplog.at_level(logging.WARNING, "rolloutbus.collector"):
        await desk.sweep_for(65)
    assert f"{words}: 2 groups (0, 1)" in caplog.text
    assert "not taken" not in caplog.text


async def test_every_batch_is_told_once_that_its_shard_has_no_instance(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """Two batches that were looked at in turn had it told at the first look of the second, and never of the first."""
    desk.broker.alive = set()
    another = Watched(desk.collection, desk.watched.outline, {})
    with caplog.at_level(logging.WARNING, "rolloutbus.collector"):
        for look in range(1, 4):
            await desk.sweep()
            await desk.sweep(of=another)
            assert caplog.text.count("no instance of shard s shows signs of life") == (0 if look == 1 else 2)


async def test_a_batch_of_which_nothing_is_out_is_left_alone(desk: Desk) -> None:
    desk.broker.state = None
    for group in range(2):
        desk.collection.skip(group)
    await desk.sweep()
    assert desk.errors == []

"""The environment and its host with a Gym made here between them: what a call comes to, whatever Gym answers.

The host runs in the test's event loop, not in a process of its own; what needs the real library is in tests/nemo_gym.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest
from rolloutbus.broker.errors import EncodeError
from rolloutbus.shard_workers.environments.nemo_gym import NemoGymEnvironment
from rolloutbus.shard_workers.environments.nemo_gym.errors import GymRolloutError, GymStackError
from rolloutbus.shard_workers.environments.nemo_gym.host import Host
from rolloutbus.shard_workers.environments.nemo_gym.settings import GymSettings
from rolloutbus.shard_workers.environments.nemo_gym.stack import GymStack
from rolloutbus.shard_workers.environments.nemo_gym.wire import Wire
from rolloutbus.shard_workers.failures import describe

from tests.stacks import within

Row = dict[str, Any]
LONE = "a \ud83d half"


class FakeGym:
    """Answers each row with what `answer` gives for it."""

    def __init__(self) -> None:
        self.answer: Callable[[Row], Awaitable[Row]] = self._well
        self.running = 0
        self.connection: socket.socket | None = None

    async def _well(self, row: Row) -> Row:
        return {"reward": 1.0}

    def addressed(self, row: Row) -> Row:
        return row

    async def rollout(self, row: Row) -> Row:
        self.running += 1
        try:
            return await self.answer(row)
        finally:
            self.running -= 1

    def poll(self) -> None: ...


@pytest.fixture
def gym() -> FakeGym:
    return FakeGym()


@pytest.fixture
async def host(gym: FakeGym) -> AsyncIterator[Wire]:
    """The worker's side of the connection to a host that serves."""
    ours, theirs = socket.socketpair()
    wire = await Wire.over(theirs)
    serving = asyncio.create_task(Host(gym, wire, GymSettings()).serve())  # pyright: ignore[reportArgumentType]
    worker = await Wire.over(ours)
    yield worker
    worker.close()
    await serving
    wire.close()


@pytest.fixture
async def environment(gym: FakeGym, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NemoGymEnvironment]:
    """Started, with a host in this loop in place of the process tree."""
    ours, theirs = socket.socketpair()
    gym.connection = theirs
    stack = Mock(spec=GymStack, rows=ours)

    async def serve() -> None:
        wire = await Wire.over(theirs)
        assert await wire.receive() is not None
        await wire.send({"entries": {}, "verifiers": {}, "version": "of the test"})
        await Host(gym, wire, GymSettings()).serve()  # pyright: ignore[reportArgumentType]
        wire.close()

    monkeypatch.setattr("importlib.util.find_spec", Mock())
    monkeypatch.setattr(GymStack, "launch", Mock(return_value=stack))
    serving = asyncio.create_task(serve())
    environment = NemoGymEnvironment()
    await environment.start({})
    yield environment
    await environment.stop()
    await serving


def group(size: int = 4, **more: Any) -> list[Row]:
    return [{"_rowidx": 8 + at, "agent_ref": {"name": "a"}, **more} for at in range(size)]


async def outcomes(environment: NemoGymEnvironment, rows: list[Row]) -> list[Any]:
    found = {row["_rowidx"]: outcome async for row, outcome in environment.run_rollouts(rows)}
    return [found[row["_rowidx"]] for row in rows]


@within(20)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (LONE, r"row 9: result\.response\.output\[0\] is a str with a lone surrogate at position 2"),
        (1 << 70, r"row 9: result\.response\.output\[0\] is an int of 71 bits"),
        ({LONE: 1}, r"row 9: result\.response\.output\[0\] has the key 'a .ud83d half'"),
    ],
)
async def test_a_result_that_cannot_travel_is_a_data_failure_of_its_row_that_says_what_stands_where(
    environment: NemoGymEnvironment, gym: FakeGym, value: object, said: str
) -> None:
    """It left its siblings without an owner, and the worker with the news that Gym's process had ended: an infra
    failure, five times, for a group of which one answer had half an emoji.
    """

    async def answer(row: Row) -> Row:
        return {"response": {"output": [value if row["_rowidx"] == 9 else "fine"]}}

    gym.answer = answer
    results = await outcomes(environment, group())
    assert [type(result) for result in results] == [dict, GymRolloutError, dict, dict]
    failure = describe(results[1])
    assert (failure.failure_class, failure.http_status) == ("data", None)
    assert re.search(said, failure.message)
    assert all(isinstance(result, dict) for result in await outcomes(environment, group(2)[:1]))


@within(20)
async def test_an_error_whose_text_cannot_travel_arrives_with_a_question_mark_in_its_place(
    environment: NemoGymEnvironment, gym: FakeGym
) -> None:
    async def answer(row: Row) -> Row:
        error = ValueError(LONE)
        error.response_content = LONE  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    gym.answer = answer
    for error in await outcomes(environment, group(2)):
        assert str(error) == "ValueError: a ? half"
        assert error.response_content == "a ? half"


@within(20)
async def test_a_rollout_that_gym_itself_cancels_fails_its_row_and_no_other(
    environment: NemoGymEnvironment, gym: FakeGym
) -> None:
    async def answer(row: Row) -> Row:
        if row["_rowidx"] == 9:
            raise asyncio.CancelledError
        return {"reward": 1.0}

    gym.answer = answer
    results = await outcomes(environment, group(3))
    assert [type(result) for result in results] == [dict, GymRolloutError, dict]
    assert "cancelled" in str(results[1])


@within(20)
async def test_a_row_that_cannot_be_given_to_gym_is_named_with_the_place_in_it(
    environment: NemoGymEnvironment,
) -> None:
    rows = group()
    rows[2]["odd"] = {"deep": [1 << 70]}
    with pytest.raises(EncodeError, match=r"group that begins at row 8 .*rows\[2\]\.odd\.deep\[0\] is an int of 71"):
        await outcomes(environment, rows)
    assert len(await outcomes(environment, group())) == 4


@within(20)
async def test_what_cannot_be_read_ends_what_runs_and_holds_nobody_up(
    environment: NemoGymEnvironment, gym: FakeGym
) -> None:
    async def answer(row: Row) -> Row:
        assert gym.connection is not None
        # A message of one byte that msgpack never uses.
        gym.connection.send(b"\0\0\0\1\xc1")
        await asyncio.Event().wait()
        raise AssertionError

    gym.answer = answer
    with pytest.raises(GymStackError):
        await outcomes(environment, group(1))


@within(20)
async def test_closing_a_call_leaves_none_of_its_rollouts(environment: NemoGymEnvironment, gym: FakeGym) -> None:
    begun = asyncio.Semaphore(0)

    async def answer(row: Row) -> Row:
        if row["_rowidx"] == 8:
            return {}
        begun.release()
        await asyncio.Event().wait()
        raise AssertionError

    gym.answer = answer
    stream = environment.run_rollouts(group(3))
    await anext(stream)
    for _ in range(2):
        await begun.acquire()
    assert gym.running == 2
    await stream.aclose()
    assert gym.running == 0


@within(20)
async def test_a_call_that_is_cancelled_before_it_has_begun_says_that_it_is_over(host: Wire) -> None:
    """Both messages may be read in one go, and a task that is cancelled before its first step never runs: the worker
    waited ten seconds, and called the host one that hangs.
    """
    await asyncio.gather(host.send({"op": "run", "call": 1, "rows": group()}), host.send({"op": "cancel", "call": 1}))
    assert await host.receive() == {"op": "ended", "call": 1}

"""One attempt's rows in an environment: each result once, and whatever breaks the contract becomes an error of this
attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from rolloutbus.broker.errors import EnvironmentContractError
from rolloutbus.shard_workers.running import GIVE_WAY_S, EnvironmentCancelledError, run_rows

Row = dict[str, Any]
Behaviour = Callable[[Sequence[Row]], Any]
FIRST = 6


class Scripted:
    """An environment that does what the test says."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.run_rollouts = behaviour


async def run(behaviour: Behaviour, *, independent: bool = False) -> list[tuple[int, Any]]:
    """What came of rows 6, 7 and 8; with the error that ended it as the last item."""
    got: list[tuple[int, Any]] = []
    rows = [{"_rowidx": FIRST + at} for at in range(3)]
    try:
        await run_rows(Scripted(behaviour), rows, lambda at, result: got.append((at, result)), independent=independent)  # pyright: ignore[reportArgumentType]
    except Exception as error:
        got.append((-1, error))
    return got


def stream(*outcomes: Any) -> Behaviour:
    """An environment that yields `outcomes`; an exception among them is raised, a function is called with the rows."""

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome(rows) if callable(outcome) else outcome

    return behaviour


def done(at: int) -> Callable[[Sequence[Row]], tuple[Row, Row]]:
    return lambda rows: (rows[at], {"reward": at})


ALL = (done(0), done(1), done(2))


async def test_results_are_given_on_in_completion_order_by_position() -> None:
    assert await run(stream(done(2), done(0), done(1))) == [(2, {"reward": 2}), (0, {"reward": 0}), (1, {"reward": 1})]


async def test_a_row_may_come_back_as_its_index() -> None:
    assert [at for at, _ in await run(stream((7, {}), (6, {}), (8, {})))] == [1, 0, 2]


NO_RESULTS: list[tuple[Any, str]] = [
    ((99, {}), "row index 99, which is not in this group (6, 7, 8)"),
    ((-1, {}), "row index -1"),
    ((True, {}), "row index True"),
    (("6", {}), "row index '6'"),
    ((6.0, {}), "row index 6.0"),
    ((None, {}), "row index None"),
    (({"other": 1}, {}), "row index None"),
    (({"_rowidx": True}, {}), "row index True"),
    ((6, None), "row 6 came back with None as its result; it must be a dict"),
    ((6, [1]), "row 6 came back with [1]"),
    ((6, "x" * 200), "row 6 came back with 'xxx"),
    (None, "yielded None; it must yield (row, result)"),
    ({"_rowidx": 6}, "it must yield (row, result)"),
    ((6, {}, 1), "it must yield (row, result)"),
]


@pytest.mark.parametrize(("item", "words"), NO_RESULTS)
async def test_what_is_no_result_of_this_group_is_refused_by_name(item: Any, words: str) -> None:
    (_, error), *rest = await run(stream(item, *ALL))
    assert isinstance(error, EnvironmentContractError)
    assert words in str(error)
    assert rest == []


async def test_a_repeated_row_is_refused_by_name() -> None:
    got = await run(stream(done(0), done(0)))
    assert got[0] == (0, {"reward": 0})
    assert "row 6 came back twice" in str(got[1][1])


async def test_too_few_rows_are_named() -> None:
    got = await run(stream(done(1)))
    assert "without a result for rows 6, 8" in str(got[-1][1])


async def test_no_row_at_all_is_told() -> None:
    assert "rows 6, 7, 8" in str((await run(stream()))[-1][1])


@pytest.mark.parametrize("returned", [None, [], {"_rowidx": 6}])
async def test_an_environment_that_returns_no_stream_is_told_so(returned: Any) -> None:
    ((_, error),) = await run(lambda rows: returned)
    assert f"run_rollouts returned {type(returned).__name__}; it must return an async iterator" in str(error)


async def test_an_environment_that_is_a_plain_coroutine_is_told_so_without_a_warning() -> None:
    async def behaviour(rows: Sequence[Row]) -> list[Row]:
        return list(rows)

    ((_, error),) = await run(behaviour)
    assert "run_rollouts returned coroutine" in str(error)


async def test_an_environment_that_raises_at_once_or_midway_gives_its_own_error() -> None:
    def at_once(rows: Sequence[Row]) -> Any:
        raise KeyError("policy")

    assert isinstance((await run(at_once))[0][1], KeyError)
    midway = await run(stream(done(0), ConnectionError("lost")))
    assert midway[0][0] == 0
    assert isinstance(midway[1][1], ConnectionError)


async def test_an_environment_that_raises_cancelled_error_itself_is_told_so() -> None:
    got = await run(stream(done(0), asyncio.CancelledError()))
    assert isinstance(got[1][1], EnvironmentCancelledError)


async def test_an_environment_that_wants_to_exit_ends_its_attempt_only() -> None:
    ((_, error),) = await run(stream(SystemExit(3)))
    assert isinstance(error, EnvironmentContractError)
    assert "SystemExit(3)" in str(error)


async def test_an_interrupt_that_is_nobodys_ctrl_c_ends_its_attempt_only() -> None:
    """Rollouts that run a model's code may raise anything, and outside of the main thread Python tells of no Ctrl-C."""
    ((_, error),) = await asyncio.to_thread(asyncio.run, run(stream(KeyboardInterrupt("stop"))))
    assert isinstance(error, EnvironmentContractError)
    assert "KeyboardInterrupt(stop)" in str(error)


async def test_a_row_that_failed_with_an_exit_which_cannot_be_printed_is_a_contract_error() -> None:
    class Rude(SystemExit):
        def __repr__(self) -> str:
            raise SystemExit

        __str__ = __repr__

    ((_, error),) = await run(stream((6, Rude())))
    assert isinstance(error, EnvironmentContractError)
    assert "a row failed with Rude(" in str(error)


async def test_a_failed_row_ends_the_attempt_at_once_and_closes_the_environment() -> None:
    closed: list[bool] = []

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        try:
            yield rows[0], ValueError("bad")
            yield rows[1], {}
        finally:
            closed.append(True)

    ((_, error),) = await run(behaviour)
    assert isinstance(error, ValueError)
    assert closed == [True]


async def test_the_siblings_of_a_failed_independent_row_go_on() -> None:
    got = await run(stream((6, ValueError("first")), done(1), (8, ValueError("second"))), independent=True)
    assert got[0] == (1, {"reward": 1})
    assert str(got[1][1]) == "first"


async def test_a_row_that_failed_with_no_exception_proper_is_a_contract_error() -> None:
    ((_, error),) = await run(stream((6, asyncio.CancelledError())))
    assert isinstance(error, EnvironmentContractError)


async def test_cancelled_from_outside_it_closes_the_environment_and_says_nothing() -> None:
    events: list[str] = []
    reached = asyncio.Event()

    async def behaviour(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        try:
            reached.set()
            await asyncio.Event().wait()
            yield None
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        finally:
            events.append("closed")

    task = asyncio.create_task(run(behaviour))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["cancelled", "closed"]


async def test_a_stream_that_is_no_generator_is_closed_too() -> None:
    class Stream:
        closed = 0

        def __aiter__(self) -> AsyncIterator[Any]:
            return self

        async def __anext__(self) -> Any:
            raise StopAsyncIteration

        async def aclose(self) -> None:
            Stream.closed += 1

    await run(lambda rows: Stream())
    assert Stream.closed == 1


async def test_a_result_that_cannot_be_given_on_ends_the_attempt_with_that_error() -> None:
    def refuse(at: int, result: Any) -> None:
        raise ValueError("cannot encode")

    with pytest.raises(ValueError, match="cannot encode"):
        await run_rows(Scripted(stream(*ALL)), [{"_rowidx": 6 + at} for at in range(3)], refuse, independent=False)  # pyright: ignore[reportArgumentType]


async def test_an_environment_that_never_waits_lets_others_have_the_loop_between_its_rows() -> None:
    """What sends the first row is a task of the same loop."""
    seen: list[str] = []

    async def busy(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        for row in rows:
            time.sleep(2 * GIVE_WAY_S)  # noqa: ASYNC251 - it is what such an environment does
            yield row, {}

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    others = asyncio.create_task(other())
    rows = [{"_rowidx": at} for at in range(3)]
    await run_rows(Scripted(busy), rows, lambda at, result: seen.append(f"row {at}"), independent=False)  # pyright: ignore[reportArgumentType]
    others.cancel()
    between = [seen[seen.index(f"row {at}") : seen.index(f"row {at + 1}")] for at in range(2)]
    assert all("other" in span for span in between)


async def test_the_next_row_is_asked_for_when_there_is_room_for_it() -> None:
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked: list[int] = []

    async def counted(rows: Sequence[Row]) -> AsyncGenerator[Any]:
        for row in rows:
            asked.append(row["_rowidx"])
            yield row, {}

    rows = [{"_rowidx": at} for at in range(3)]
    running = asyncio.create_task(
        run_rows(Scripted(counted), rows, lambda at, result: room if at == 0 else None, independent=False)  # pyright: ignore[reportArgumentType]
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked == [0]
    room.set_result(None)
    await asyncio.wait_for(running, 10)
    assert asked == [0, 1, 2]

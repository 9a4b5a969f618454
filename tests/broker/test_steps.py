"""Steps and what becomes of their replies, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rolloutbus.broker.channel import Command, ReplyError
from rolloutbus.broker.errors import BrokerAuthError, BrokerError, BrokerFullError
from rolloutbus.broker.scripts import SCRIPTS
from rolloutbus.broker.steps import run_step, run_steps

SINGLE: list[Command] = [("GET", "a")]
DOUBLE: list[Command] = [("XADD", "s", "*", "a", "b"), ("EVALSHA", "sha", 0)]


class Scripted:
    """Answers each write with the replies prepared for it, and remembers what was written."""

    def __init__(self, *replies: list[Any]) -> None:
        self._replies = list(replies)
        self.written: list[list[Command]] = []

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        self.written.append(list(commands))
        replies = self._replies.pop(0) if self._replies else [b"OK"] * len(commands)
        assert len(replies) == len(commands)
        return replies


async def test_a_single_command_is_no_transaction_and_several_are_one():
    runner = Scripted([b"1", b"OK", b"QUEUED", b"QUEUED", [b"1-1", [b"ok"]], b"2"])
    assert await run_steps(runner, [SINGLE, DOUBLE, SINGLE]) == [[b"1"], [b"1-1", [b"ok"]], [b"2"]]
    assert [command[0] for command in runner.written[0]] == ["GET", "MULTI", "XADD", "EVALSHA", "EXEC", "GET"]


async def test_a_refused_step_disturbs_no_other():
    runner = Scripted([b"OK", ReplyError("OOM used"), b"QUEUED", ReplyError("EXECABORT discarded"), b"fine"])
    refused, fine = await run_steps(runner, [DOUBLE, SINGLE])
    assert isinstance(refused, BrokerFullError)
    assert "OOM used" in str(refused)
    assert fine == [b"fine"]


async def test_an_error_inside_a_transaction_is_the_steps_error():
    runner = Scripted([b"OK", b"QUEUED", b"QUEUED", [ReplyError("WRONGTYPE no stream"), [b"gone"]]])
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await run_step(runner, *DOUBLE)


async def test_a_permission_that_is_missing_is_told_as_such():
    with pytest.raises(BrokerAuthError, match="ACL"):
        await run_step(Scripted([ReplyError("NOPERM no evalsha")]), *SINGLE)


async def test_what_was_added_before_a_forgotten_script_is_deleted_first_and_only_that_step_repeated():
    forgot = [b"1-1", ReplyError("NOSCRIPT no matching script")]
    loads = [b"sha"] * len(SCRIPTS)
    runner = Scripted(
        [b"OK", b"QUEUED", b"QUEUED", forgot, b"single"],
        [1, *loads],
        [b"OK", b"QUEUED", b"QUEUED", [b"1-2", [b"ok"]]],
    )
    assert await run_steps(runner, [DOUBLE, SINGLE]) == [[b"1-2", [b"ok"]], [b"single"]]
    assert runner.written[1][0] == ("XDEL", "s", b"1-1")
    assert [command[:2] for command in runner.written[1][1:]] == [("SCRIPT", "LOAD")] * len(SCRIPTS)
    assert [command[0] for command in runner.written[2]] == ["MULTI", "XADD", "EVALSHA", "EXEC"]


async def test_an_entry_that_was_not_added_is_not_deleted():
    forgot = [None, ReplyError("NOSCRIPT")]
    runner = Scripted(
        [b"OK", b"QUEUED", b"QUEUED", forgot],
        [b"sha"] * len(SCRIPTS),
        [b"OK", b"QUEUED", b"QUEUED", [None, [b"no-stream"]]],
    )
    assert await run_step(runner, *DOUBLE) == [None, [b"no-stream"]]

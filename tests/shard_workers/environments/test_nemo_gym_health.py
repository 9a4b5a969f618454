"""Health over its own connection: an answer belongs to its question, however late it comes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from rolloutbus.shard_workers.environments.nemo_gym.errors import GymStackError
from rolloutbus.shard_workers.environments.nemo_gym.host import answer_health
from rolloutbus.shard_workers.environments.nemo_gym.settings import GymSettings
from rolloutbus.shard_workers.environments.nemo_gym.stack import GymStack
from rolloutbus.shard_workers.environments.nemo_gym.wire import encode

from tests.stacks import within

SHORT_S, AMPLE_S = 0.1, 20.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The worker's end and the host's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def stack(ends: tuple[socket.socket, socket.socket]) -> GymStack:
    """A stack whose process lives."""
    return GymStack(Mock(poll=lambda: None), Mock(), ends[0], GymSettings())


async def times_out(stack: GymStack, ours: socket.socket) -> None:
    ours.settimeout(SHORT_S)
    with pytest.raises(GymStackError, match="does not answer"):
        await asyncio.to_thread(stack.check_health)
    ours.settimeout(AMPLE_S)


@within(30)
async def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(
    stack: GymStack, ends: tuple[socket.socket, socket.socket]
) -> None:
    """It stayed in the socket, and all health was that of the question before from then on."""
    ours, theirs = ends
    go_on, looks = threading.Event(), iter([RuntimeError("a server hangs"), None, RuntimeError("a server died")])

    def poll() -> None:
        go_on.wait(AMPLE_S)
        if trouble := next(looks):
            raise trouble

    answering = threading.Thread(target=answer_health, args=(Mock(poll=poll), theirs))
    answering.start()
    await times_out(stack, ours)
    go_on.set()
    await asyncio.to_thread(stack.check_health)
    with pytest.raises(GymStackError, match="a server died"):
        await asyncio.to_thread(stack.check_health)
    ours.close()
    answering.join()


@within(30)
async def test_an_answer_that_is_cut_by_the_time_limit_is_read_to_its_end(
    stack: GymStack, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = ends
    await times_out(stack, ours)
    late = encode({"question": theirs.recv(1)[0], "trouble": "of long ago"})
    theirs.sendall(late[:9])
    await times_out(stack, ours)
    later = encode({"question": theirs.recv(1)[0], "trouble": "of a while ago"})
    theirs.sendall(late[9:] + later)
    asking = asyncio.create_task(asyncio.to_thread(stack.check_health))
    question = await asyncio.to_thread(theirs.recv, 1)
    theirs.sendall(encode({"question": question[0], "trouble": ""}))
    await asking

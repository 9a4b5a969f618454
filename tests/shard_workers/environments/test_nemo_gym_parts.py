"""The parts of the `nemo_gym` environment that need no NeMo Gym: its keys, its errors, its wire, the guard of its
processes.

What needs the real library is in tests/nemo_gym.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy
import psutil
import pytest
from rolloutbus.broker.errors import ConfigError, EncodeError
from rolloutbus.shard_workers.environments.nemo_gym import NemoGymEnvironment, supervisor
from rolloutbus.shard_workers.environments.nemo_gym.errors import (
    GroupSizeError,
    GymConnectionError,
    GymRolloutError,
    GymRowTimeoutError,
    GymStackError,
    pack_error,
    unpack_error,
)
from rolloutbus.shard_workers.environments.nemo_gym.settings import Verifier, check_group, check_start, split_config
from rolloutbus.shard_workers.environments.nemo_gym.wire import Receiver, Wire, encode
from rolloutbus.shard_workers.failures import describe

VERIFIERS = {"agent": Verifier("genrm_compare", 4)}


def test_keys_of_ours_are_read_and_kept_from_gym() -> None:
    settings, gym = split_config(
        {"rolloutbus_row_timeout_s": 5, "rolloutbus_one_venv": None, "a": {"b": 1}, "config_dir": "/x"}
    )
    assert (settings.row_timeout_s, settings.one_venv) == (5, False)
    assert gym == {"a": {"b": 1}}


def test_a_key_of_ours_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="row_timeout"):
        split_config({"rolloutbus_row_timeout": 5})


def test_config_paths_are_also_looked_for_beside_the_config_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    _, gym = split_config({"config_dir": str(tmp_path), "config_paths": ["mine.yaml", "resources_servers/mcqa.yaml"]})
    assert gym["config_paths"] == [str(tmp_path / "mine.yaml"), "resources_servers/mcqa.yaml"]


def test_a_group_that_is_smaller_or_larger_than_its_verifier_waits_for_is_refused() -> None:
    check_group(VERIFIERS, "agent", [None] * 4)
    check_group(VERIFIERS, "another", [None] * 3)
    with pytest.raises(GroupSizeError, match=r"genrm_compare scores 4 .*this call has 3 rows.*rerun: group"):
        check_group(VERIFIERS, "agent", [None] * 3)


def test_num_generations_is_checked_at_the_start_where_it_is_known() -> None:
    check_start(VERIFIERS, None)
    check_start(VERIFIERS, 4)
    with pytest.raises(GroupSizeError, match="num_generations is 8"):
        check_start(VERIFIERS, 8)


class ClientResponseError(Exception):
    """As aiohttp and Gym make it."""

    status = 503
    response_content = b'"the judge is out"'


class ServerDisconnectedError(Exception):
    pass


class ClientConnectionError(ServerDisconnectedError):
    pass


@pytest.mark.parametrize(
    ("raised", "kind", "failure_class", "status"),
    [
        (ClientResponseError("503"), GymRolloutError, "infra", 503),
        (ValueError("no such agent"), GymRolloutError, "data", None),
        (TimeoutError("row 3"), GymRowTimeoutError, "infra", None),
        (ClientConnectionError("cut"), GymConnectionError, "infra", None),
        (ConnectionResetError("cut"), GymConnectionError, "infra", None),
        (GymStackError("server died"), GymStackError, "infra", None),
    ],
)
def test_gyms_errors_arrive_as_plain_ones_with_class_status_and_text(
    raised: Exception, kind: type[Exception], failure_class: str, status: int | None
) -> None:
    arrived = pickle.loads(pickle.dumps(unpack_error(pack_error(raised))))
    assert type(arrived) is kind
    failure = describe(arrived)
    assert (failure.failure_class, failure.http_status) == (failure_class, status)
    assert type(raised).__name__ in failure.message
    if status:
        assert "the judge is out" in failure.message


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


async def test_arrays_travel_as_lists_and_a_closed_end_is_the_end(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    wire = await Wire.over(one)
    await wire.send({"ids": numpy.arange(3), "scalar": numpy.float32(0.5), "big": "x" * 100_000})
    received = await asyncio.to_thread(Receiver(other).receive)
    assert (received["ids"], received["scalar"], len(received["big"])) == ([0, 1, 2], 0.5, 100_000)
    other.sendall(encode({"answer": 1}))
    assert await wire.receive() == {"answer": 1}
    other.close()
    assert await wire.receive() is None
    wire.close()


def test_a_value_without_a_json_form_is_named() -> None:
    with pytest.raises(EncodeError, match=r"the message: row\.odd\[1\] is of type object, which has no JSON form"):
        encode({"row": {"odd": [1, object()]}})


async def test_without_nemo_gym_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", Mock(return_value=None))
    with pytest.raises(ConfigError, match=r"rolloutbus\[nemo-gym\]"):
        await NemoGymEnvironment().start({})


# A child that ignores SIGTERM, and a grandchild whose parent is gone and which is in a session of its own.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def guarded(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(supervisor.__file__), "0.2", sys.executable, "-c", code]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={"ROLLOUTBUS_GYM_FDS": ""}
    )


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")
@pytest.mark.parametrize("how", ["lifeline", "sigterm"])
def test_the_supervisor_ends_the_whole_tree_orphans_and_the_stubborn_included(how: str) -> None:
    with guarded(STUBBORN) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        tree = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        if how == "lifeline":
            process.stdin.close()
        else:
            process.terminate()
        assert process.wait(10) == 0
        assert psutil.wait_procs(tree, timeout=0)[1] == []


def test_the_supervisor_ends_with_its_command_and_passes_its_code_on() -> None:
    with guarded("raise SystemExit(7)") as process:
        assert process.wait(10) == 7

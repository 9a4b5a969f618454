"""An embedded broker in a program or on a disk that is in trouble: it works all the same, or says what is wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rolloutbus.broker import embedded
from rolloutbus.broker.embedded import LOG_NAME, EmbeddedBroker
from rolloutbus.broker.errors import EmbeddedBrokerError
from rolloutbus.broker.supervisor import CONFIG_NAME
from rolloutbus.broker.supervisor_link import SupervisorLink


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """So many that whatever is opened next has a number beyond 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_it_starts_and_ends_in_a_program_with_more_than_a_thousand_open_files() -> None:
    """`select` takes no descriptor beyond 1023; the start failed, and a `stop` left server and folder behind."""
    with EmbeddedBroker() as broker:
        assert broker.pid is not None
        server, folder = psutil.Process(broker.pid), broker.directory
        broker.restart()
    assert not server.is_running()
    assert folder is not None
    assert not folder.exists()


def test_stop_ends_the_server_also_where_its_answers_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = EmbeddedBroker().start()
    assert broker.pid is not None
    server, folder = psutil.Process(broker.pid), broker.directory

    def drain(link: SupervisorLink) -> Any:
        raise ValueError("no answers today")

    monkeypatch.setattr(SupervisorLink, "drain", drain)
    with pytest.raises(ValueError, match="no answers today"):
        broker.stop()
    monkeypatch.undo()
    assert not server.is_running()
    assert folder is not None
    assert not folder.exists()
    assert broker.directory is None


@pytest.mark.parametrize("name", [LOG_NAME, CONFIG_NAME])
def test_a_folder_where_a_file_of_its_own_belongs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    said = rf"embedded broker: cannot .* its directory {tmp_path}: .* \({tmp_path / name}\); see that you may write"
    with pytest.raises(EmbeddedBrokerError, match=said):
        EmbeddedBroker(directory=tmp_path).start()
    (tmp_path / name).rmdir()
    with EmbeddedBroker(directory=tmp_path) as broker:
        assert broker.pid is not None


@pytest.mark.parametrize("at", ["write_private", "SupervisorLink"])
def test_a_full_disk_is_told_and_its_private_folder_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(embedded, at, refuse)
    with pytest.raises(EmbeddedBrokerError, match=r"No space left .* disk has room"):
        EmbeddedBroker().start()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_temporary_files_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EmbeddedBrokerError, match=r"cannot make a private folder: No such file .*/gone/.* set TMPDIR"):
        EmbeddedBroker().start()


def test_it_comes_back_where_somebody_removed_its_log(tmp_path: Path) -> None:
    with EmbeddedBroker(directory=tmp_path) as broker:
        broker.kill()
        (tmp_path / LOG_NAME).unlink()
        broker.restart()
        assert broker.pid is not None


def test_a_supervisor_that_cannot_be_replaced_is_told_and_the_broker_can_still_be_stopped(tmp_path: Path) -> None:
    broker = EmbeddedBroker(directory=tmp_path).start()
    assert broker.supervisor_pid is not None
    supervisor = psutil.Process(broker.supervisor_pid)
    supervisor.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor.wait(5)
    (tmp_path / LOG_NAME).unlink()
    (tmp_path / LOG_NAME).mkdir()
    with pytest.raises(EmbeddedBrokerError, match="cannot begin in its directory"):
        broker.restart()
    broker.stop()
    assert broker.directory is None

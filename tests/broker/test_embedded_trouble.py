"""An embedded broker in a program or on a disk that is in trouble: it works all the same, or says what is wrong."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
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

"""A broker's password stands in its URL and nowhere else: not in logs, errors, reprs, process titles, nor on the
broker itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.trainer import RolloutClient
from rolloutbus.trainer.cli import main

from tests.regressions.arena import RUN, Arena, Environment, arena_on, rows_of

QUICK: dict[str, Any] = {"connect_timeout_s": 0.5, "command_timeout_s": 0.5, "reconnect_timeout_s": 0.5, "lease_s": 2.0}


@pytest.fixture
async def arena(tmp_path: Path) -> AsyncIterator[Arena]:
    """On the loopback, where the embedded broker makes a password."""
    async with arena_on(tmp_path, tcp=True) as made:
        yield made


async def test_a_batch_with_its_faults_logs_no_secret(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = arena.broker.password
    assert secret
    arena.worker("s/0", Environment(), data_attempts=1)
    rows = rows_of(6, 2)
    async with arena.client() as client, client.run_groups(rows, 2, on_failure="yield") as batch:
        await anext(batch)
        await asyncio.to_thread(arena.broker.restart)
        async for _ in batch:
            pass
    assert "rolloutbus" in {record.name.split(".")[0] for record in caplog.records}
    assert secret not in caplog.text
    assert secret not in str(arena.control.xrange(arena.keys.events))


async def test_no_process_shows_a_secret_in_its_title(arena: Arena) -> None:
    secret = arena.broker.password
    assert secret
    await arena.process("s/0")
    shown = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert len(shown) >= 3
    assert not [title for title in shown if secret in title]
    names = [client["name"] for client in arena.control.client_list()]
    assert not [name for name in names if secret in name]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@127.0.0.1:1/0",
        "redis://user:hunter2@127.0.0.1:1/0",
        "unix://:hunter2@/nowhere/sock",
        "unix:///nowhere/sock?password=hunter2",
        "redis://:hunter2@127.0.0.1:notaport/0",
        "rediss://:hunter2@127.0.0.1:1/0?ssl_ca_certs=/nowhere",
        "http://:hunter2@127.0.0.1/0",
        "redis://:hunter2@127.0.0.1:1/zero",
    ],
)
async def test_errors_about_an_address_hide_its_secret(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(RolloutBusError) as caught:
        async with RolloutClient.connect(url, run=RUN, settings=QUICK):
            pass
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in f"{error} {error!r}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert "hunter2" not in caplog.text


async def test_a_wrong_password_is_not_repeated(arena: Arena) -> None:
    url = arena.broker.url.replace(str(arena.broker.password), "hunter2")
    with pytest.raises(RolloutBusError, match="refused") as caught:
        async with RolloutClient.connect(url, run=RUN, settings=QUICK):
            pass
    assert "hunter2" not in str(caught.value)
    assert str(arena.broker.password) not in str(caught.value)


def test_settings_do_not_show_their_address() -> None:
    settings = BrokerSettings(url="redis://:hunter2@localhost/0")
    assert "hunter2" not in f"{settings} {settings!r}"


def test_settings_that_are_refused_do_not_show_their_address() -> None:
    with pytest.raises(ValueError, match="leese_s") as caught:
        RolloutClient("redis://:hunter2@localhost/0", run=RUN, settings={"leese_s": 3, "lease_s": "x"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["doctor"], ["explain", "b", "0"], ["dead", "list"]]
)
async def test_the_command_line_tells_no_secret(
    arena: Arena, command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = arena.broker.password
    assert secret
    monkeypatch.setenv("REDIS_URL", arena.broker.url)
    monkeypatch.setattr("sys.argv", ["rolloutbus", *command])
    with pytest.raises(SystemExit):
        await asyncio.to_thread(main)
    out, err = capfd.readouterr()
    assert out + err
    assert secret not in out + err

"""What `up` says, over a fleet that ends by itself; `test_run.py` has whole ones."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.trainer.cli import fleet_commands

from .conftest import call

CONFIG = """\
rolloutbus: {environment: functions}
env: {nemo_gym: {policy: offline, arithmetic: {function: "asyncio:sleep"}}}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def ended(_: float) -> str:
        return "it was told to"

    @contextmanager
    def fleet(*_: object, **__: object) -> Generator[SimpleNamespace]:
        yield SimpleNamespace(run="default", wait=ended)

    monkeypatch.setattr(fleet_commands, "running_fleet", fleet)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return str(tmp_path / "c.yaml")


def test_up_prints_a_line_for_the_shell_where_the_broker_is_its_own(config: str) -> None:
    first, line = call("up", "-c", config, code=1).out.splitlines()
    assert first == "run default is up; trainers find its broker by"
    assert line.startswith('export REDIS_URL="unix://')


def test_up_prints_no_password_and_nothing_that_cannot_be_used(config: str, broker: EmbeddedBroker) -> None:
    """It told trainers to connect to an address with `***` in it."""
    said = call("up", "-c", config, "--broker-url", broker.url, code=1)
    assert said.out == "run default is up; trainers use this broker and --run default\n"

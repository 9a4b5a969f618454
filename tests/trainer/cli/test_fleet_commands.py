"""What `up` says over a fleet that ends by itself, and what `scale` and `drain` say to a busy one.

`test_run.py` has whole ones.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rolloutbus.broker import fleet_requests
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.trainer.cli import fleet_commands

from .conftest import SHARD, Stage, call

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


@pytest.fixture
def busy_fleet(stage: Stage) -> Stage:
    """A fleet by name only: it has the run, an earlier wish, and no time."""
    stage.redis.set(stage.keys.fleet, "incarnation host-a, process 7")
    stage.redis.hset(stage.keys.fleet_requests, f"want:scale:{SHARD}", "earlier 2")
    return stage


def test_drain_says_on_standard_error_what_it_waits_for(busy_fleet: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """After "asked the fleet" it said nothing until the answer came."""
    monkeypatch.setattr(fleet_requests, "TOLD_AFTER_S", 0.0)
    requests, told, say = busy_fleet.keys.fleet_requests, threading.Event(), fleet_commands.say

    def hear(text: str, *style: str) -> None:
        say(text, *style)
        if text.startswith("waiting for"):
            told.set()

    def answer() -> None:
        assert told.wait(20)
        wish = busy_fleet.redis.hget(requests, f"want:drain:{SHARD}").split()[0]
        busy_fleet.redis.hset(requests, f"answer:{wish}", "ok")

    monkeypatch.setattr(fleet_commands, "say", hear)
    with ThreadPoolExecutor(1) as fleet:
        answered = fleet.submit(answer)
        drained = call("drain", SHARD)
        answered.result()
    assert "waiting for the fleet on host-a, process 7, to drain math (0 s so far); it was asked to" in drained.said
    assert "it was asked to scale math 2 too" in drained.said
    assert drained.out == "instance math of run exp1 is drained and gone\n"


def test_scale_and_drain_tell_a_misspelt_name_though_the_fleet_is_busy(busy_fleet: Stage) -> None:
    assert (
        "there is no shard 'maths' (did you mean 'math'?); there are math" in call("scale", "maths", "2", code=1).said
    )
    said = call("drain", "math/1", code=1).said
    assert "there is no instance 'math/1' (did you mean 'math'?); there are math" in said
    assert "asked the fleet" not in said

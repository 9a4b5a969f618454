"""The process of an instance, without Ray around it: what it answers while its environment starts, blocks, or fails."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers import WorkerSettings
from rolloutbus.shard_workers.fleet.actor import BUSY, DRAINED, HEALTHY, InstanceActor, InstanceSpec, Trouble
from rolloutbus.shard_workers.fleet.supervision import RestartPolicy
from rolloutbus.shard_workers.fleet_config import FleetSettings

from tests.shard_workers.fleet.stacks import ProbeEnvironment, events


class HookedEnvironment(ProbeEnvironment):
    """Its health is what a test puts here."""

    blocks_s = 0.0
    hangs = False

    async def start(self, config: Mapping[str, Any]) -> None:
        if config.get("exit"):
            raise SystemExit("not here")
        await super().start(config)

    async def health(self) -> None:
        if self.hangs:
            await asyncio.sleep(1e6)


class TalkativeEnvironment(ProbeEnvironment):
    async def start(self, config: Mapping[str, Any]) -> None:
        print("the judge", "is up", flush=True)
        print("a warning", file=sys.stderr)
        sys.stdout.writelines(["and", " more\n"])


class ThreadHealthEnvironment(HookedEnvironment):
    health_in_any_thread = True


@pytest.fixture
def actor() -> Iterator[InstanceActor]:
    made = InstanceActor()
    yield made
    made.stop()


def spec_of(
    valkey: EmbeddedBroker, folder: Path, environment: str = "HookedEnvironment", **config: Any
) -> InstanceSpec:
    return InstanceSpec(
        run="actor",
        shard="math",
        label="math",
        environment=f"{__name__}:{environment}",
        config={"folder": str(folder), "hosts": ["math"], **config},
        broker=BrokerSettings(url=valkey.url),
        workers=WorkerSettings(),
        working_folder=os.getcwd(),
    )


def block(actor: InstanceActor, seconds: float) -> threading.Event:
    """Keep the actor's event loop busy; the event is set once it is."""
    begun = threading.Event()

    def hold() -> None:
        begun.set()
        time.sleep(seconds)

    actor._thread.loop.call_soon_threadsafe(hold)  # pyright: ignore[reportPrivateUsage]
    return begun


def test_what_an_environment_prints_is_in_its_log_folder_too(
    actor: InstanceActor, valkey: EmbeddedBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was only in Ray's files, and the folder that the config asks for was not even made."""
    before, folder = sys.stdout, tmp_path / "logs" / "math"
    assert actor.start(spec_of(valkey, tmp_path, "TalkativeEnvironment", nemo_gym_log_dir=str(folder))) is None
    assert actor.stop() is None
    assert sys.stdout is before
    kept = (folder / "instance.log").read_text()
    assert kept.startswith("the judge is up\na warning\nand more\n")
    assert "the judge is up\nand more\n" in capsys.readouterr().out


def test_a_log_folder_that_cannot_be_made_is_told(actor: InstanceActor, valkey: EmbeddedBroker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trouble = actor.start(spec_of(valkey, tmp_path, nemo_gym_log_dir=str(tmp_path / "file" / "math")))
    assert trouble is not None
    assert str(tmp_path / "file") in trouble.message


def test_it_starts_reports_begins_drains_and_stops_twice(
    valkey: EmbeddedBroker, tmp_path: Path, actor: InstanceActor
) -> None:
    assert actor.start(spec_of(valkey, tmp_path)) is None
    assert actor.list_entries() == {"math": ["responses_api_agents"]}
    assert actor.health(5) == HEALTHY
    identity = actor.begin()
    assert not isinstance(identity, Trouble)
    assert (identity.pid, identity.consumer) == (os.getpid(), f"math:{identity.incarnation}")
    assert actor.status()["slots"] == 64
    assert actor.drain(5) == DRAINED
    assert actor.wait_end() == DRAINED
    assert (actor.stop(), actor.stop()) == (None, None)
    assert len(events(tmp_path, "stopping")) == 1


def test_stop_cancels_a_start_that_takes_long(valkey: EmbeddedBroker, tmp_path: Path, actor: InstanceActor) -> None:
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(actor.start, spec_of(valkey, tmp_path, start_s=600))
        while not events(tmp_path, "starting"):
            assert not starting.done()
        assert actor.health(5) == HEALTHY, "it answers while it starts"
        assert actor.stop() is None
        trouble = starting.result(5)
    assert trouble is not None
    assert trouble.type == "CancelledError"


def test_a_failure_leaves_as_plain_text(valkey: EmbeddedBroker, tmp_path: Path, actor: InstanceActor) -> None:
    trouble = actor.start(spec_of(valkey, tmp_path, fail="no {key}"))
    assert trouble is not None
    assert (trouble.type, trouble.message) == ("ForeignError", "no {key}")
    assert "stacks.py" in trouble.traceback
    assert all(type(part) is str for part in trouble)


def test_an_environment_that_wants_to_exit_fails_its_start_only(
    valkey: EmbeddedBroker, tmp_path: Path, actor: InstanceActor
) -> None:
    trouble = actor.start(spec_of(valkey, tmp_path, exit=True))
    assert trouble is not None
    assert "SystemExit(not here)" in trouble.message
    assert actor.health(5) == HEALTHY


def test_a_blocked_loop_is_busy_and_a_hanging_check_is_sick(
    valkey: EmbeddedBroker, tmp_path: Path, actor: InstanceActor
) -> None:
    actor.start(spec_of(valkey, tmp_path))
    block(actor, 1.5).wait()
    assert actor.health(0.1) == BUSY
    assert actor.health(10) == HEALTHY
    HookedEnvironment.hangs = True
    try:
        answer = actor.health(0.2)
    finally:
        HookedEnvironment.hangs = False
    assert isinstance(answer, Trouble)
    assert answer.message == "health() did not return within 0.2 s"


def test_a_check_that_needs_no_loop_answers_under_any_load(
    valkey: EmbeddedBroker, tmp_path: Path, actor: InstanceActor
) -> None:
    actor.start(spec_of(valkey, tmp_path, "ThreadHealthEnvironment"))
    block(actor, 1.0).wait()
    assert actor.health(0.5) == HEALTHY


def test_without_a_start_it_is_not_healthy_and_stops(actor: InstanceActor) -> None:
    assert isinstance(actor.health(1), Trouble)
    assert actor.stop() is None


def test_a_broker_that_cannot_be_reached_fails_the_start_at_once(tmp_path: Path, actor: InstanceActor) -> None:
    spec = InstanceSpec(
        "actor", "math", "math", f"{__name__}:HookedEnvironment", {"folder": str(tmp_path)},
        BrokerSettings(url="redis://127.0.0.1:1/0"), WorkerSettings(), os.getcwd(),
    )  # fmt: skip
    trouble = actor.start(spec)
    assert trouble is not None
    assert trouble.type == "BrokerUnavailableError"
    assert not events(tmp_path, "starting")


def test_restarts_back_off_up_to_a_bound_and_end_with_the_budget() -> None:
    policy = RestartPolicy(FleetSettings(max_restarts=4, restart_backoff_s=1, restart_backoff_max_s=5))
    deaths: deque[float] = deque()
    assert [policy.next_delay(deaths, now) for now in (0, 10, 20, 30, 40)] == [1, 2, 4, 5, None]


def test_deaths_of_more_than_an_hour_ago_are_forgotten() -> None:
    policy = RestartPolicy(FleetSettings(max_restarts=1, restart_backoff_s=1))
    deaths: deque[float] = deque()
    assert [policy.next_delay(deaths, now) for now in (0.0, 3600.0, 7199.0)] == [1, 1, None]

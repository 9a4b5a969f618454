"""Environments in a job's own hands: the bare handle that reads as a fleet, and the end of all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ConfigError, FleetError
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.shard_workers import as_shard_fleet, shutdown_environments
from rolloutbus.shard_workers.fleet import HandleFleet
from rolloutbus.trainer import RolloutClient

from tests.shard_workers.fleet.conftest import keys_of
from tests.shard_workers.fleet.fleets import BROKER, Redis, ray, rows_for

pytestmark = pytest.mark.usefixtures("local_ray")


@ray.remote(num_cpus=0)
class GymActor:
    """The shape of a trainer's own actor."""

    def __init__(self, folder: str, fails: str = "") -> None:
        self._folder = Path(folder)
        self._fails = fails

    async def run_rollouts(self, rows: list[dict[str, Any]], prefix: str = "") -> AsyncIterator[tuple[int, Any, Any]]:
        for row in reversed(rows):
            yield row["_rowidx"], {"reward": 1.0, "row": row["_rowidx"], "prefix": prefix}, {"seconds": 1.0}

    async def shutdown(self) -> None:
        with (self._folder / "ends").open("a") as ends:
            ends.write("end\n")
        if self._fails == "raises":
            raise RuntimeError("cannot")
        if self._fails == "hangs":
            await asyncio.sleep(1e6)


@ray.remote(num_cpus=0)
class SyncActor:
    def run_rollouts(self, rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
        for row in rows:
            yield row, {"row": row["_rowidx"]}

    def shutdown(self) -> None: ...


class Owner:
    """Something that owns actors, such as a client."""

    def __init__(self, error: str = "") -> None:
        self.ends = 0
        self._error = error

    def shutdown(self) -> None:
        self.ends += 1
        if self._error:
            raise RuntimeError(self._error)


class Closing:
    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


class Local:
    async def run_rollouts(self, rows: Sequence[dict[str, Any]]) -> AsyncIterator[tuple[dict[str, Any], Any]]:
        for row in rows:
            yield row, {"row": row["_rowidx"]}


def ends(folder: Path) -> int:
    return len((folder / "ends").read_text().splitlines()) if (folder / "ends").exists() else 0


def dies(handle: Any) -> bool:
    """Whether the actor is dead within ten seconds: `ray.kill` does not wait, and a dying one may still answer."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            ray.get(handle.__ray_ready__.remote(), timeout=5)
        except RayActorError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", ["async actor", "sync actor", "plain object"])
def test_a_bare_handle_serves_its_run_as_one_shard_with_one_replica(
    valkey: EmbeddedBroker, tmp_path: Path, broker: Redis, kind: str
) -> None:
    handle: Any = {
        "async actor": lambda: GymActor.remote(str(tmp_path)),
        "sync actor": SyncActor.remote,
        "plain object": Local,
    }[kind]()
    arguments = ["timing"] if kind == "async actor" else []
    run = f"handle-{kind.split()[0]}"
    with as_shard_fleet(handle, BrokerSettings(url=valkey.url, **BROKER), run, arguments=arguments) as fleet:
        assert (fleet.labels, fleet.route_map) == ({"nemo_gym": ["nemo_gym"]}, {"*": "nemo_gym"})
        assert as_shard_fleet(fleet) is fleet
        results = RolloutClient.run_sync(valkey.url, rows_for(["any"], 3), 4, run=run, settings=BROKER)
        with pytest.raises(FleetError, match="has a fleet already"):
            as_shard_fleet(handle, BrokerSettings(url=valkey.url, **BROKER), run)
    assert [result["row"] for result in results] == list(range(12))
    assert keys_of(broker, run) == {"events"}
    if kind == "async actor":
        assert results[0]["prefix"] == "timing"
        assert ends(tmp_path) == 1
    fleet.shutdown()


def test_reading_as_a_fleet_needs_no_broker_and_anything_else_is_refused(tmp_path: Path) -> None:
    fleet = as_shard_fleet(Local())
    assert isinstance(fleet, HandleFleet)
    fleet.shutdown()
    with pytest.raises(ConfigError, match="int is no fleet and has no run_rollouts"):
        as_shard_fleet(3)


def test_each_distinct_environment_is_ended_once(tmp_path: Path) -> None:
    shared, owner, closing = GymActor.remote(str(tmp_path)), Owner(), Closing()
    again = ray.get(ray.put([shared]))[0]
    assert again is not shared
    shutdown_environments(
        {"math": shared, "fleet": owner, "none": None}, {"val": again, "fleet": owner}, {"client": closing}, None
    )
    assert (ends(tmp_path), owner.ends, closing.closed) == (1, 1, 1)


@pytest.mark.parametrize("fails", ["raises", "hangs"])
def test_an_actor_that_does_not_end_is_killed_and_the_others_are_ended(
    tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = GymActor.remote(str(tmp_path), fails), GymActor.remote(str(tmp_path))
    ray.get([bad.__ray_ready__.remote(), good.__ray_ready__.remote()])
    shutdown_environments({"bad": bad, "good": good}, timeout_s=5 if fails == "raises" else 1)
    assert ends(tmp_path) == 2
    assert dies(bad)
    assert "bad: its actor did not shut down" in caplog.text
    ray.kill(good)


def test_an_owner_that_fails_is_named_after_all_are_ended(tmp_path: Path) -> None:
    failing, good = Owner("busy"), Owner()
    with pytest.raises(FleetError, match=r"first: RuntimeError: busy; third: object has neither shutdown nor close"):
        shutdown_environments({"first": failing, "second": good, "third": object()})
    assert (failing.ends, good.ends) == (1, 1)

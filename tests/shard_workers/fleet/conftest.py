"""One local Ray for each module of tests, fleets that are shut down whatever happens, and the check that nothing of
them is left.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.shard_workers import ShardFleet

from tests.shard_workers.fleet.fleets import Redis, StartFleet, connected, ray


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[str]:
    """Short, because Ray puts sockets into it."""
    folder = tempfile.mkdtemp(prefix="rb-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def local_ray(ray_folder: str) -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=ray_folder)
    yield
    ray.shutdown()


@pytest.fixture
def broker(valkey: EmbeddedBroker) -> Iterator[Redis]:
    with connected(valkey.url) as client:
        yield client


@pytest.fixture
def start_fleet(broker: Redis) -> Iterator[StartFleet]:
    """`start_fleet(config, …)`; at the end each fleet is shut down, and no key of its run may be left but the record of
    events.
    """
    fleets: list[ShardFleet] = []

    def start(config: dict[str, Any], **options: Any) -> ShardFleet:
        fleets.append(ShardFleet.start(config, **options))
        return fleets[-1]

    yield start
    for fleet in reversed(fleets):
        fleet.shutdown(drain=False)
    for fleet in fleets:
        assert keys_of(broker, fleet.run) <= {"events", "dead"}


def keys_of(client: Redis, run: str) -> set[str]:
    """The run's keys, without their common prefix."""
    prefix = f"rolloutbus:{{{run}}}:"
    return {key.removeprefix(prefix) for key in client.scan_iter(match=prefix + "*")}

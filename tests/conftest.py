"""One server of each make for all tests of a run; each test works in a run (a key namespace) of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker

from tests.servers import start_redis, start_valkey

# The real NeMo Gym, in an environment of its own: see .ci/nemo_gym.
collect_ignore = ["nemo_gym"]


@pytest.fixture(scope="session")
def valkey() -> Iterator[EmbeddedBroker]:
    with start_valkey() as broker:
        yield broker


@pytest.fixture(scope="session")
def redis_7() -> Iterator[EmbeddedBroker]:
    with start_redis() as broker:
        yield broker

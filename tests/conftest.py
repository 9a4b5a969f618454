"""One server of each make for all tests of a run; each test works in a run (a key namespace) of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker

from tests.servers import start_redis, start_valkey


@pytest.fixture(scope="session")
def valkey() -> Iterator[EmbeddedBroker]:
    with start_valkey() as broker:
        yield broker


@pytest.fixture(scope="session")
def redis_7() -> Iterator[EmbeddedBroker]:
    with start_redis() as broker:
        yield broker

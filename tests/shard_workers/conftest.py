"""A run of its own for each test of the worker, on one broker for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker

from tests.stacks import Stack, stack_on


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as server:
        yield server


@pytest.fixture
async def stack(broker: EmbeddedBroker) -> AsyncIterator[Stack]:
    """One shard `s` for route `a`, without a worker."""
    async with stack_on(broker) as made:
        made.host()
        yield made

"""One mcqa stack for all tests that leave it whole, and the check after each test that nothing runs which did not
before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.shard_workers.environments.nemo_gym import NemoGymEnvironment

from tests.nemo_gym.support import Model, gym_config, shipped_config

ROW_TIMEOUT_S = 12.0


@pytest.fixture(scope="session")
def canned() -> Iterator[Model]:
    model = Model()
    yield model
    model.down()


@pytest.fixture
def model(canned: Model) -> Iterator[Model]:
    """The canned model, behaving well at the start of each test."""
    yield canned
    canned.reset()


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as server:
        yield server


@pytest.fixture(scope="session")
async def mcqa(canned: Model) -> AsyncIterator[NemoGymEnvironment]:
    environment = NemoGymEnvironment()
    more = {"rolloutbus_row_timeout_s": ROW_TIMEOUT_S}
    await environment.start(gym_config(canned, shipped_config("mcqa"), ports=(21_000, 21_100), **more))
    yield environment
    await environment.stop()


@pytest.fixture(autouse=True)
def _no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """What lives for the session is there before; whatever a test adds must be gone after it."""
    for shared in ("canned", "broker", "mcqa"):
        if shared in request.fixturenames:
            request.getfixturevalue(shared)
    before = set(psutil.Process().children(recursive=True))
    yield
    added = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert psutil.wait_procs(added, timeout=10)[1] == []

"""One server of each make for all tests of a run; each test works in a run (a key namespace) of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker

from tests.servers import start_redis, start_valkey

# The real NeMo Gym, in an environment of its own: see .ci/nemo_gym.
collect_ignore = ["nemo_gym"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of a tool that is not on this machine are left out; in CI they run, and fail where it is missing."""
    missing = {tool for tool in ("redis-server", "redis-cli", "openssl") if shutil.which(tool) is None}
    if "CI" in os.environ or not missing:
        return
    left_out = [item for item in items if missing & _tools_of(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _tools_of(item: pytest.Item) -> set[str]:
    """The tools that a test needs, by its fixtures, its parameters and its marker `tools`."""
    fixtures: list[str] = getattr(item, "fixturenames", [])
    params: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    tools = {str(tool) for mark in item.iter_markers("tools") for tool in mark.args}
    # By identity and type: a parameter may be an array, which has no truth of its own.
    asked = any(value is start_redis or (isinstance(value, str) and value == "redis_7") for value in params.values())
    if asked or {"redis_7", "tls_redis"} & {*fixtures}:
        tools.add("redis-server")
    if "certificates" in fixtures:
        tools.add("openssl")
    return tools


@pytest.fixture(scope="session")
def valkey() -> Iterator[EmbeddedBroker]:
    with start_valkey() as broker:
        yield broker


@pytest.fixture(scope="session")
def redis_7() -> Iterator[EmbeddedBroker]:
    with start_redis() as broker:
        yield broker

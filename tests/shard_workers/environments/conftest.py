"""Environments started around functions that a test defines, and the check that none of their tasks is left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from rolloutbus.shard_workers.environments.functions import FunctionsEnvironment

Start = Callable[..., Awaitable[FunctionsEnvironment]]

MODULE = "functions_under_test"


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`await start(function, **entry_options)` gives an environment whose entry `probe` is that function."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    started: list[FunctionsEnvironment] = []

    async def start_environment(function: Callable[..., Any], **options: Any) -> FunctionsEnvironment:
        module.__dict__["function"] = function
        environment = FunctionsEnvironment()
        entry = {"function": f"{MODULE}:function", **options}
        await environment.start({"policy": "offline", "probe": entry})
        started.append(environment)
        return environment

    yield start_environment
    for environment in started:
        await environment.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}

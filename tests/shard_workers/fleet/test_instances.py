"""What is asked of an instance: each wait ends, and is told meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from rolloutbus.shard_workers.fleet import instances
from rolloutbus.shard_workers.fleet.instances import Instance, InstanceTroubleError, Launcher
from rolloutbus.shard_workers.fleet.placement import Bundle


class NoAnswer:
    """A method of an actor that nobody has started yet."""

    def remote(self, *_: object) -> NoAnswer:
        return self

    def future(self) -> concurrent.futures.Future[Any]:
        return concurrent.futures.Future()


async def test_an_instance_that_finds_no_place_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node was lost and no other had room: nothing was said until the whole time for a start was over."""
    monkeypatch.setattr(instances, "TOLD_EVERY_S", 0.05)
    config: Any = SimpleNamespace(fleet=SimpleNamespace(health_timeout_s=0.3))
    place: Any = Bundle(None, 0, 2.0)  # pyright: ignore[reportArgumentType]
    instance = Instance(SimpleNamespace(name="math"), "math", 0, None, place)  # pyright: ignore[reportArgumentType]
    instance.handle = SimpleNamespace(list_entries=NoAnswer())  # pyright: ignore[reportAttributeAccessIssue]
    instance.born = asyncio.get_running_loop().create_future()
    with caplog.at_level(logging.WARNING, "rolloutbus.fleet"), pytest.raises(InstanceTroubleError, match="2 CPUs free"):
        await Launcher(config, None, None).list_entries(instance)
    assert "instance math): list_entries is not done after" in caplog.text
    assert "is there a node with 2 CPUs free?" in caplog.text

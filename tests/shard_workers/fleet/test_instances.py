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


def instance_with(**methods: NoAnswer) -> Instance:
    """One whose actor has these methods, and has not begun."""
    place: Any = Bundle(None, 0, 2.0)  # pyright: ignore[reportArgumentType]
    instance = Instance(SimpleNamespace(name="math"), "math", 0, None, place)  # pyright: ignore[reportArgumentType]
    instance.handle = SimpleNamespace(**methods)  # pyright: ignore[reportAttributeAccessIssue]
    instance.born = asyncio.get_running_loop().create_future()
    return instance


async def test_an_instance_that_finds_no_place_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node was lost and no other had room: nothing was said until the whole time for a start was over."""
    monkeypatch.setattr(instances, "TOLD_EVERY_S", 0.05)
    config: Any = SimpleNamespace(fleet=SimpleNamespace(health_timeout_s=0.3))
    instance = instance_with(list_entries=NoAnswer())
    with caplog.at_level(logging.WARNING, "rolloutbus.fleet"), pytest.raises(InstanceTroubleError, match="2 CPUs free"):
        await Launcher(config, None, None).list_entries(instance)
    assert "instance math): list_entries is not done after" in caplog.text
    assert "is there a node with 2 CPUs free?" in caplog.text


async def test_an_environment_that_blocks_its_loop_is_called_that(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """«health is not done after 30 s» told nobody what to look for."""
    monkeypatch.setattr(instances, "_SLACK_S", 0.0)
    monkeypatch.setattr(instances, "TOLD_EVERY_S", 0.05)
    config: Any = SimpleNamespace(fleet=SimpleNamespace(health_timeout_s=0.3))
    instance = instance_with(health=NoAnswer())
    assert instance.born is not None
    instance.born.set_result(None)
    with (
        caplog.at_level(logging.WARNING, "rolloutbus.fleet"),
        pytest.raises(InstanceTroubleError, match=r"time\.sleep"),
    ):
        await Launcher(config, None, None).health(instance)
    assert "blocks its event loop" in caplog.text


def test_rays_reason_for_a_death_is_whole_as_far_as_it_goes() -> None:
    """It ended inside a word, before two of the three things that commonly kill a process."""
    cause = (
        "The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: InstanceActor\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
        "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the "
        "worker crashed unexpectedly due to SIGSEGV or another unexpected error. If the process was killed by the "
        "kernel OOM killer, consider enabling resource isolation"
    )
    said = instances._first_words(RuntimeError(cause))  # pyright: ignore[reportPrivateUsage]
    assert said.startswith("The actor died unexpectedly before finishing this task. The actor is dead because")
    assert "(3) the worker crashed unexpectedly due to SIGSEGV" in said
    assert said.endswith(" …")

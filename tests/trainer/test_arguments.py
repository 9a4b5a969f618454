"""What a caller gives wrongly is refused at once, by an error of ours that names it."""

from __future__ import annotations

import asyncio
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from rolloutbus.broker.errors import ConfigError, RolloutBusError, RowError, RowTypeError, UnknownBatchError, UsageError
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.trainer import NemoRLEnvironment, RolloutClient

from tests.stacks import Stack, rows_of, within

NOWHERE = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": 5}, {"run": None}, {"client": None}, {"client": 5}, {"settings": 5}, {"settings": "redis://:secret@h"},
        {"settings": [1]}, {"fleet_wait_s": "5"}, {"fleet_wait_s": None}, {"fleet_wait_s": -1}, {"fleet_wait_s": True},
        {"fleet_wait_s": float("nan")}, {"name_wait_s": "5"}, {"timer_prefix": None}, {"url": None}, {"url": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_client_names_the_argument_that_is_wrong(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name) as caught:
        RolloutClient.connect(**{"url": NOWHERE, "run": "r", **wrong})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"run": 5}, {"client": 5}, {"settings": 5}, {"fleet_wait_s": "5"}, {"url": 5}], ids=str
)
def test_the_adapter_names_it_too_and_not_only_at_its_first_call(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    given: dict[str, Any] = {"url": NOWHERE, "run": "r", "num_generations": 2, **wrong}
    with pytest.raises(ConfigError, match=name):
        NemoRLEnvironment(**given)


@pytest.mark.parametrize("seconds", [0, 5, 2.5, float("inf"), numpy.float32(1.5)])
def test_any_number_of_seconds_will_do(seconds: float) -> None:
    RolloutClient.connect(NOWHERE, run="r", fleet_wait_s=seconds, name_wait_s=seconds)


def test_settings_are_copied() -> None:
    given: dict[str, Any] = {"lease_s": 7.0}
    client = RolloutClient.connect(NOWHERE, run="r", settings=given)
    given["lease_s"] = -1
    other = RolloutClient.connect(NOWHERE, run="r", settings=BrokerSettings(lease_s=7.0))
    assert client._engine.settings == other._engine.settings == BrokerSettings(url=NOWHERE, lease_s=7.0)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("wrong", ["Raise", "ignore", "", None, True, ["raise"]])
@within(20)
async def test_a_misspelt_on_failure_is_refused_before_anything_is_published(stack: Stack, wrong: Any) -> None:
    """It was taken for "yield", so that failures went unseen."""
    client = await stack.connected()
    refused = "on_failure must be 'raise' or 'yield', but is"
    for begin in (client.run_groups, client.run_rollouts):
        with pytest.raises(ConfigError, match=refused):
            begin(rows_of(1), 2, on_failure=wrong)
    with pytest.raises(ConfigError, match=refused):
        await client.resume("0123456789ab", on_failure=wrong)
    assert [key for key in stack.redis.scan_iter(f"{stack.keys.prefix}*") if b":batch:" in key] == []


def test_plain_code_is_told_before_it_connects() -> None:
    on_failure: Any = "Raise"
    with pytest.raises(ConfigError, match="on_failure"):
        RolloutClient.run_sync(NOWHERE, rows_of(1), 2, run="r", on_failure=on_failure)
    with pytest.raises(RowTypeError, match="row 1 is a str"):
        RolloutClient.run_sync(NOWHERE, [*rows_of(1, 1), "text"], 2, run="r")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "rows", [numpy.array(rows_of(2), dtype=object), numpy.zeros((4, 2)), "text", b"text", {}, 5, None, iter(rows_of(1))]
)
@within(20)
async def test_rows_that_are_no_list_of_dicts_are_refused_by_type(stack: Stack, rows: Any) -> None:
    client = await stack.connected()
    with pytest.raises(RowTypeError, match=f"the rows are a {type(rows).__name__}; give a list of dicts"):
        client.run_groups(rows, 2)


@pytest.mark.parametrize("batch_id", [None, 5, b"0123456789ab", "\ud800", "", "a b", "*"])
@within(20)
async def test_what_cannot_be_a_batchs_id_is_not_looked_for(stack: Stack, batch_id: Any) -> None:
    client = await stack.connected()
    kind = UnknownBatchError if isinstance(batch_id, str) else ConfigError
    with pytest.raises(kind, match="batch_id"):
        await client.resume(batch_id)


@within(20)
async def test_in_an_event_loop_run_sync_says_what_to_write_instead(stack: Stack) -> None:
    """A notebook has one; it said nothing but that asyncio.run() cannot be called, and that something was never
    awaited.
    """
    await stack.worker()
    options: dict[str, Any] = {"run": stack.run, "settings": stack.options}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UsageError, match=r"await asyncio\.to_thread\(RolloutClient\.run_sync"):
            RolloutClient.run_sync(stack.broker.url, rows_of(1), 2, **options)
    assert len(await asyncio.to_thread(RolloutClient.run_sync, stack.broker.url, rows_of(1), 2, **options)) == 2


COPIES: list[Callable[[Any], Any]] = [pickle.dumps, copy.deepcopy]


@pytest.mark.parametrize("duplicate", COPIES)
@within(20)
async def test_a_client_and_its_batches_cannot_travel_and_say_so(stack: Stack, duplicate: Callable[[Any], Any]) -> None:
    client = await stack.connected()
    async with client.run_groups(rows_of(1), 2) as batch:
        for thing in (client, batch, RolloutClient.connect(NOWHERE, run="r")):
            with pytest.raises(RolloutBusError, match="RolloutClient and its batches cannot be pickled or copied"):
                duplicate(thing)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_number_of_generations_that_is_none_is_refused_where_it_is_given(number: Any) -> None:
    """`with_num_generations(0)` became a division by zero inside of a step."""
    with pytest.raises((RowError, RowTypeError), match="num_generations must be"):
        NemoRLEnvironment(NOWHERE, run="r", num_generations=number)
    with pytest.raises((RowError, RowTypeError), match="num_generations must be"):
        NemoRLEnvironment(NOWHERE, run="r", num_generations=2).with_num_generations(number)

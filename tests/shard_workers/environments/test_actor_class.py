"""The `actor_class` environment around classes of the shape of NeMo RL's Gym actor, written here, alone and behind a
worker.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ClosedError, ConfigError, EnvironmentContractError
from rolloutbus.shard_workers.environments.actor_class import ActorClassEnvironment
from rolloutbus.shard_workers.environments.registry import load_environment

from tests.stacks import Row, rows_of, stack_on, within

MODULE = "actors_under_test"
TOKENIZER = object()


class Actor:
    """Counts what is done to it; its rollouts wait for `gate`."""

    made: list[Actor]

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg = cfg
        self.calls: list[Any] = []
        self.closed = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.well = True
        Actor.made.append(self)

    def _spinup(self) -> None:
        self.calls.append(("spinup", threading.current_thread() is threading.main_thread()))

    def list_entries(self) -> dict[str, list[str]]:
        return {"a": ["responses_api_agents"]}

    async def run_rollouts(
        self, nemo_gym_examples: list[Row], tokenizer: Any, timer_prefix: str
    ) -> AsyncGenerator[Any]:
        self.calls.append((tokenizer, timer_prefix))
        try:
            for at, row in enumerate(reversed(nemo_gym_examples)):
                await self.gate.wait()
                last = at + 1 == len(nemo_gym_examples)
                timing = {f"{timer_prefix}/await_results": 9.0, f"{timer_prefix}/postprocess_results": 0.5}
                seen = {name: row[name] for name in ("_ng_task_index", "_ng_rollout_index", "_ng_group_attempt")}
                result = {"reward": 1.0, "seen": seen, "full_result": dict(seen), **seen}
                yield row["_rowidx"], result, timing if last else None
        finally:
            self.closed += 1

    async def health_check(self) -> None:
        if not self.well:
            raise RuntimeError("server `judge` finished")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class ActorWithTokenizer(Actor):
    """As newer NeMo RL has it: the tokenizer is set once, and each item names its agent."""

    def set_tokenizer(self, tokenizer: Any) -> None:
        self.calls.append(("tokenizer", tokenizer))

    async def run_rollouts(self, nemo_gym_examples: list[Row], timer_prefix: str) -> AsyncGenerator[Any]:  # type: ignore[override]
        for row in nemo_gym_examples:
            yield row["_rowidx"], row["agent_ref"], {"reward": 2.0}, None


class PlainActor(Actor):
    """Its `run_rollouts` is a plain generator, which blocks its thread."""

    def run_rollouts(self, nemo_gym_examples: list[Row], tokenizer: Any, timer_prefix: str) -> Iterator[Any]:  # type: ignore[override]
        for row in nemo_gym_examples:
            assert threading.current_thread() is not threading.main_thread()
            yield row["_rowidx"], {"reward": 3.0}, None


class Blocking(PlainActor):
    """All its methods are plain, and each step holds its thread until `release`."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__(cfg)
        self.release, self.steps = threading.Event(), threading.Semaphore(0)

    def run_rollouts(self, nemo_gym_examples: list[Row], tokenizer: Any, timer_prefix: str) -> Iterator[Any]:  # type: ignore[override]
        for row in nemo_gym_examples:
            self.steps.release()
            assert self.release.wait(20)
            yield row["_rowidx"], {"reward": 3.0}, None

    def wait_for_steps(self, count: int) -> None:
        for _ in range(count):
            assert self.steps.acquire(timeout=10), "a step waits for another"

    def health_check(self) -> None:  # type: ignore[override]
        self.calls.append("health")


class ForeignRows(Actor):
    async def run_rollouts(
        self, nemo_gym_examples: list[Row], tokenizer: Any, timer_prefix: str
    ) -> AsyncGenerator[Any]:
        yield 99, {"reward": 0.0}, None


class WrongItems(Actor):
    async def run_rollouts(
        self, nemo_gym_examples: list[Row], tokenizer: Any, timer_prefix: str
    ) -> AsyncGenerator[Any]:
        yield {"reward": 0.0}


class FailsToSpinUp(Actor):
    def _spinup(self) -> None:
        raise OSError("no port left")


class NotQuite:
    def _spinup(self) -> None:
        """All that it has."""


# What `ray.remote` makes of a class, as far as it matters.
Decorated = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=SimpleNamespace(__ray_actor_class__=Actor)))


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    module = ModuleType(MODULE)
    module.__dict__.update({**globals(), "make_tokenizer": lambda: TOKENIZER})
    monkeypatch.setitem(sys.modules, MODULE, module)
    Actor.made = []


Host = Callable[..., Any]


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    """`await host("Class", **config)` gives the environment and the instance in it."""
    started: list[ActorClassEnvironment] = []

    async def start(name: str, **config: Any) -> tuple[ActorClassEnvironment, Any]:
        environment = load_environment("actor_class")
        assert isinstance(environment, ActorClassEnvironment)
        started.append(environment)
        await environment.start({"rolloutbus_actor_class": f"{MODULE}:{name}", **config})
        return environment, Actor.made[-1]

    yield start
    for environment in started:
        await environment.stop()


def group(**more: Any) -> list[Row]:
    return [{**row, "_rowidx": 6 + at, "_group_id": "batch:3:1", **more} for at, row in enumerate(rows_of(1, 3))]


async def test_the_class_gets_the_model_beside_the_shards_config_and_spins_up_off_the_event_loop(host: Host) -> None:
    _, actor = await host(
        "Actor", policy_base_url="http://model/v1", policy_model_name="m", port_range_low=1, port_range_high=9,
        config_dir="/somewhere", config_paths=["a.yaml"], judge={"x": 1},
    )  # fmt: skip
    assert actor.cfg == {
        "model_name": "m",
        "base_urls": ["http://model/v1"],
        "port_range_low": 1,
        "port_range_high": 9,
        "initial_global_config_dict": {"config_paths": ["a.yaml"], "judge": {"x": 1}},
    }
    assert actor.calls == [("spinup", False)]


async def test_results_come_back_with_the_rows_that_were_given_in_the_classes_order(host: Host) -> None:
    environment, _ = await host("Actor")
    rows = group()
    items = [item async for item in environment.run_rollouts(rows)]
    assert [row["_rowidx"] for row, _ in items] == [8, 7, 6]
    assert all(row is rows[row["_rowidx"] - 6] for row, _ in items)


async def test_the_tokenizer_is_made_once_at_the_start(host: Host) -> None:
    environment, actor = await host("Actor", rolloutbus_tokenizer=f"{MODULE}:make_tokenizer")
    for _ in range(2):
        assert len([item async for item in environment.run_rollouts(group())]) == 3
    assert actor.calls[1:] == [(TOKENIZER, "actor"), (TOKENIZER, "actor")]


async def test_a_class_with_set_tokenizer_gets_it_there_and_may_name_the_agent_in_its_items(host: Host) -> None:
    environment, actor = await host("ActorWithTokenizer", rolloutbus_tokenizer=TOKENIZER)
    assert actor.calls[0] == ("tokenizer", TOKENIZER)
    assert [result["reward"] async for _, result in environment.run_rollouts(group())] == [2.0] * 3


async def test_a_plain_generator_runs_in_a_thread(host: Host) -> None:
    environment, _ = await host("PlainActor")
    assert [result["reward"] async for _, result in environment.run_rollouts(group())] == [3.0] * 3


async def test_a_class_decorated_for_ray_is_hosted_without_ray(host: Host) -> None:
    environment, actor = await host("Decorated")
    assert type(actor) is Actor
    assert environment.list_entries() == {"a": ["responses_api_agents"]}


async def test_group_identity_is_new_in_each_call_and_the_callers_own_comes_back(host: Host) -> None:
    environment, _ = await host("Actor")
    seen: list[set[Any]] = []
    for _ in range(2):
        results = [result async for _, result in environment.run_rollouts(group(_ng_task_index=5))]
        assert {result["_ng_task_index"] for result in results} == {5}
        assert {result["full_result"]["_ng_task_index"] for result in results} == {5}
        assert not any(
            "_ng_group_attempt" in result or "_ng_group_attempt" in result["full_result"] for result in results
        )
        assert sorted(result["seen"]["_ng_rollout_index"] for result in results) == [0, 1, 2]
        seen.append({result["seen"]["_ng_task_index"] for result in results})
    assert [len(task) for task in seen] == [1, 1]
    assert seen[0] != seen[1]


async def test_closing_a_call_closes_the_classes_stream(host: Host) -> None:
    environment, actor = await host("Actor")
    actor.gate.clear()
    stream = environment.run_rollouts(group())
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await stream.aclose()
    assert actor.closed == 1


@pytest.mark.parametrize(("name", "said"), [("ForeignRows", "row 99"), ("WrongItems", "yielded dict")])
async def test_items_that_are_none_of_the_contract_are_errors(host: Host, name: str, said: str) -> None:
    environment, _ = await host(name)
    with pytest.raises(EnvironmentContractError, match=said):
        _ = [item async for item in environment.run_rollouts(group())]


async def test_health_is_what_the_class_says(host: Host) -> None:
    environment, actor = await host("Actor")
    await environment.health()
    actor.well = False
    with pytest.raises(RuntimeError, match="judge"):
        await environment.health()


@within(20)
async def test_rollouts_that_block_hold_up_neither_each_other_nor_health_nor_names(host: Host) -> None:
    """They shared asyncio's pool, of 32 threads at most: a healthy instance with more was restarted as a sick one."""
    environment, actor = await host("Blocking")
    streams = [environment.run_rollouts(group()) for _ in range(40)]
    firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
    try:
        await asyncio.to_thread(actor.wait_for_steps, 40)
        await environment.health()
        assert actor.calls[-1] == "health"
        assert await asyncio.get_running_loop().getaddrinfo("localhost", 1)
    finally:
        actor.release.set()
        await asyncio.gather(*firsts)
        for stream in streams:
            await stream.aclose()


@within(20)
async def test_stopping_waits_for_no_step_that_hangs(host: Host) -> None:
    environment, actor = await host("Blocking")
    stream = environment.run_rollouts(group())
    first = asyncio.ensure_future(anext(stream))
    await asyncio.to_thread(actor.wait_for_steps, 1)
    await environment.stop()
    assert actor.calls[-1] == "shutdown"
    assert not first.done()
    actor.release.set()
    await first
    with pytest.raises(ClosedError, match="was stopped"):
        await anext(stream)
    await stream.aclose()


async def test_the_class_is_shut_down_once_also_after_a_failed_start(host: Host) -> None:
    environment = load_environment("actor_class")
    with pytest.raises(OSError, match="no port left"):
        await environment.start({"rolloutbus_actor_class": f"{MODULE}:FailsToSpinUp"})
    await environment.stop()
    await environment.stop()
    assert Actor.made[-1].calls == ["shutdown"]


async def test_what_is_no_such_class_is_named(host: Host) -> None:
    with pytest.raises(ConfigError, match="lacks list_entries"):
        await host("NotQuite")
    with pytest.raises(ConfigError, match="is no class"):
        await host("make_tokenizer")
    with pytest.raises(ConfigError, match="actor_class"):
        await ActorClassEnvironment().start({})
    with pytest.raises(ConfigError, match="actor_clas"):
        await ActorClassEnvironment().start({"rolloutbus_actor_class": "m:C", "rolloutbus_actor_clas": 1})


async def test_before_the_start_nothing_runs_and_stopping_is_harmless() -> None:
    environment = ActorClassEnvironment()
    await environment.stop()
    with pytest.raises(ClosedError):
        environment.list_entries()


@within(20)
async def test_the_classes_times_are_merged_with_the_workers(host: Host) -> None:
    """Post-processing counts for both; waiting is the worker's alone, because the class adds up what overlaps."""
    with EmbeddedBroker() as broker:
        async with stack_on(broker) as stack:
            stack.host()
            environment, _ = await host("Actor")
            await stack.worker(environment)
            client = await stack.connected()
            async with client.run_groups(rows_of(4, 3), 3) as batch:
                assert len([found async for found in batch]) == 4
            prefix = "timing/rollout"
            assert 2.0 <= batch.metrics[f"{prefix}/postprocess_results"] < 4.0
            assert batch.metrics[f"{prefix}/await_results"] < 4.0
            assert batch.metrics[f"{prefix}/postprocess_results_pct"] > 50

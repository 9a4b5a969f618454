"""Every transition of a run touches one hash slot, whatever the names are: computed here, no cluster needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot
from rolloutbus.broker.channel import Command, Payload
from rolloutbus.broker.client_transitions import BatchSpec, ClientTransitions, OutgoingGroup, cancel_batch
from rolloutbus.broker.keys import NAME_PATTERN, Keys
from rolloutbus.broker.messages import Failure, parse_group
from rolloutbus.broker.scripts import SCRIPTS
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.steps import run_step
from rolloutbus.broker.worker_transitions import Acceptance, Attempt, HeldGroup, Identity, Rows, WorkerTransitions

from tests.servers import FakeRunner

NAMES = st.from_regex(NAME_PATTERN, fullmatch=True).filter(lambda name: len(name) < 40)
KEYS_BEFORE = {
    "XADD": 1,
    "XDEL": 1,
    "XGROUP": 2,
    "XPENDING": 1,
    "XRANGE": 1,
    "XACK": 1,
    "PEXPIRE": 1,
    "HGET": 1,
    "EXISTS": 1,
}
FLEET = {"fleet_answer", "fleet_claim", "fleet_publish", "fleet_remove", "fleet_renew", "fleet_request"}


class Recording(FakeRunner):
    """Remembers, step by step, the keys that were named, and which scripts ran."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []
        self.scripts: set[str] = set()
        self._names = {script.sha: script.name for script in SCRIPTS.values()}

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        in_transaction = False
        for command in commands:
            if command[0] in ("MULTI", "EXEC"):
                in_transaction = command[0] == "MULTI"
                self.steps += [[]] * 0 if command[0] == "EXEC" else [list[str]()]
            elif command[0] != "SCRIPT":
                if not in_transaction:
                    self.steps.append([])
                self.steps[-1] += self._keys(command)
        return await super().run(commands)

    def _keys(self, command: Command) -> Iterator[str]:
        if command[0] == "EVALSHA":
            self.scripts.add(self._names[str(command[1])])
            yield from map(str, command[3 : 3 + int(command[2])])  # pyright: ignore[reportArgumentType]
        elif command[0] == "XREADGROUP":
            yield str(command[list(command).index("STREAMS") + 1])
        else:
            yield str(command[KEYS_BEFORE[str(command[0])]])


async def play(runner: Recording, run: str, client_name: str, shard: str, label: str) -> None:
    """Each transition at least once."""
    keys, chosen, failure = Keys(run), BrokerSettings(), Failure("infra", "E", "m")
    client = ClientTransitions(runner, keys, chosen, client_name, "incarnation")
    worker = WorkerTransitions(runner, keys, chosen, Identity(shard, label, "i"))
    await client.own()
    batches = ["b0", "b1"]
    for batch in batches:
        layout = json.dumps([[shard, "route", 3]])
        await client.open(BatchSpec(batch, 3, 3, 1, (shard,), layout))
        groups = [OutgoingGroup(batch, at, shard, "route", 1, at, Payload.of([b"x"])) for at in range(3)]
        published = await client.publish(groups)
        await client.restore(batch, 1, {0: "handed"})
        await client.seal(batch)
        await client.forget_unread(batch, [shard])
    await client.make_results([shard])
    await worker.prepare()
    await worker.register()
    await worker.peers()
    attempts: list[Attempt] = []
    command = ("XREADGROUP", "GROUP", "workers", f"{label}:i", "COUNT", 5, "STREAMS", keys.groups(shard), ">")
    for raw in (await runner.run([command]))[0][0][1]:
        group = parse_group(*raw)
        taken = await worker.take(group, raw[0].decode(), observing=True, crash_limit=5)
        attempts.append(Attempt(group, raw[0].decode(), taken.attempt))
    await worker.renew(
        [HeldGroup(a.group.batch, a.group.entry, a.group.group, a.token) for a in attempts], 4, observing=True
    )
    rows = [Rows((0,), Payload.of([b"r"]))]
    await worker.accept([Acceptance(attempts[0], rows, True), Acceptance(attempts[1], rows, True)])
    await worker.fail(attempts[2], failure, limit=1, delay_s=0)
    await worker.release(attempts[3])
    await worker.fetch((await worker.claim(5, observing=True, peers=())).entries)
    await worker.set_aside(attempts[4].group.entry, "why")
    await worker.unseen()
    await client.handed("b0", shard, [0], {"1-1": 1})
    await client.expire(shard, groups[2], published[2].entry, "no_instance", 1, failure)  # pyright: ignore
    await client.adopt("b1")
    await run_step(runner, SCRIPTS["revoke"].call([keys.groups(shard)], f"{label}:i", 1))
    await cancel_batch(runner, keys, "b1", client_name, [shard], "why")
    for batch in batches:
        await client.close(batch, {shard: []})
    await worker.leave()
    await client.resign([shard])


def test_the_slot_is_computed_as_redis_does():
    assert key_slot(b"123456789") == 0x31C3
    assert key_slot(b"{user1000}.following") == key_slot(b"user1000")


@settings(max_examples=15, deadline=None)
@given(run=NAMES, client=NAMES, shard=NAMES, replica=st.integers(0, 99))
def test_no_step_touches_two_slots(run: str, client: str, shard: str, replica: int):
    runner = Recording()
    asyncio.run(play(runner, run, client, shard, f"{shard}/{replica}"))
    assert runner.scripts == set(SCRIPTS) - FLEET
    slot = key_slot(run.encode())
    for step in runner.steps:
        assert step
        assert {key_slot(key.encode()) for key in step} == {slot}, step


@given(run=NAMES, name=NAMES)
def test_every_key_of_a_run_is_in_the_runs_slot(run: str, name: str):
    keys = Keys(run)
    singles = [
        keys.routes,
        keys.shards,
        keys.fleet,
        keys.fleet_requests,
        keys.dead,
        keys.events,
        keys.results(name, name),
    ]
    named = [keys.instance, keys.groups, keys.delayed, keys.parked, keys.batch, keys.accepted, keys.owner]
    names = singles + [make(name) for make in named]
    assert {key_slot(key.encode()) for key in names} == {key_slot(run.encode())}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_scripts_name_no_key_but_by_the_runs_prefix(script: str):
    """What a script makes up itself begins with the prefix it was given, which carries the hash tag."""
    assert "rolloutbus:" not in SCRIPTS[script].source

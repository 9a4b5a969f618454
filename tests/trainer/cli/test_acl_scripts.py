"""Each role may do on each family of keys whatever its scripts may ever do there. What a script does only in a rare
case is refused only then, so the sources are read; `test_acl` sees that the rules stand for what they say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from rolloutbus.broker.channel import Command, Payload
from rolloutbus.broker.client_transitions import BatchSpec, ClientTransitions, OutgoingGroup, cancel_batch
from rolloutbus.broker.fleet_requests import Request
from rolloutbus.broker.fleet_transitions import FleetTransitions, Published
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.messages import Failure, GroupEntry
from rolloutbus.broker.scripts import SCRIPTS
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.worker_transitions import Acceptance, Attempt, HeldGroup, Identity, Rows, WorkerTransitions
from rolloutbus.trainer.cli.acl_rules import ROLES, Role

from .conftest import RUN, SHARD
from .lua_calls import Use, uses_of

KEYS, SETTINGS = Keys(RUN), BrokerSettings()
SHARDS = (SHARD, "code")
FAILURE = Failure("infra", "TimeoutError", "too slow", "")
GROUP = GroupEntry("1-1", "b", 0, "trainer", "a", 2, 0, b"")
OUTGOING = OutgoingGroup("b", 0, SHARD, "a", 2, 0, Payload.of([b"rows"]))
ATTEMPT = Attempt(GROUP, "token", 1)


class Asked(Exception):
    """Ends a transition at its first step."""


class Recorder:
    """A broker that only listens."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        self.commands += commands
        raise Asked


Step = Callable[[Any], Awaitable[Any]]


def client(step: Callable[[ClientTransitions], Awaitable[Any]]) -> Step:
    return lambda runner: step(ClientTransitions(runner, KEYS, SETTINGS, "trainer", "mine"))


def worker(step: Callable[[WorkerTransitions], Awaitable[Any]]) -> Step:
    return lambda runner: step(WorkerTransitions(runner, KEYS, SETTINGS, Identity(SHARD, f"{SHARD}/0", "mine")))


def fleet(step: Callable[[FleetTransitions], Awaitable[Any]]) -> Step:
    return lambda runner: step(FleetTransitions(runner, KEYS, SETTINGS, "a test"))


EITHER = [
    client(lambda it: it.own()), client(lambda it: it.resign(SHARDS)),
    client(lambda it: it.close("b", {shard: ["1-1"] for shard in SHARDS})),
]  # fmt: skip
PRODUCER = [
    *EITHER,
    client(lambda it: it.open(BatchSpec("b", 1, 2, 2, SHARDS))), client(lambda it: it.publish([OUTGOING])),
    client(lambda it: it.restore("b", 4, {1: "handed"})),
    client(lambda it: it.seal("b")),
]  # fmt: skip
COLLECTOR = [
    *EITHER,
    client(lambda it: it.make_results(SHARDS)), client(lambda it: it.forget_unread("b", SHARDS)),
    client(lambda it: it.handed("b", SHARD, [0], {"1-1": 1})),
    client(lambda it: it.expire(SHARD, OUTGOING, "1-1", "deadline", 1.0, FAILURE)),
    client(lambda it: it.set_aside(SHARD, "1-1", "foreign")),
]  # fmt: skip
WORKER = [
    worker(lambda it: it.prepare()), worker(lambda it: it.unseen()),
    worker(lambda it: it.take(GROUP, "token", observing=True, crash_limit=5)),
    worker(lambda it: it.claim(1, observing=True, peers=[f"{SHARD}/1"])),
    worker(lambda it: it.renew([HeldGroup("b", "1-1", 0, "token")], 1, observing=True)),
    worker(lambda it: it.accept([Acceptance(ATTEMPT, [Rows((0, 1), OUTGOING.payload)], finish=True)])),
    worker(lambda it: it.fail(ATTEMPT, FAILURE, limit=1, delay_s=1.0)), worker(lambda it: it.release(ATTEMPT)),
    worker(lambda it: it.fetch(["1-1"])), worker(lambda it: it.set_aside("1-1", "foreign")),
    worker(lambda it: it.peers()), worker(lambda it: it.leave()),
]  # fmt: skip
FLEET = [
    fleet(lambda it: it.claim()), fleet(lambda it: it.publish(Published({"a": SHARD}, {}))),
    fleet(lambda it: it.renew(SHARDS, "1")), fleet(lambda it: it.remove(SHARDS, [SHARD], "1.1")),
    fleet(lambda it: it.bury(SHARD, SHARD, "consumer", "theirs")),
    fleet(lambda it: it.answer(Request("1", "drain:x"), "ok")),
]  # fmt: skip
STEPS: dict[str, list[Step]] = {
    "producer": PRODUCER,
    "collector": COLLECTOR,
    "trainer": [*PRODUCER, *COLLECTOR, client(lambda it: it.adopt("b"))],
    "worker": WORKER,
    "fleet": [*WORKER, *FLEET],
    "operator": [
        lambda runner: cancel_batch(runner, KEYS, "b", "trainer", SHARDS, "enough"),
        lambda runner: runner.run([SCRIPTS["fleet_request"].call([KEYS.fleet, KEYS.fleet_requests])]),
    ],
}


def family(key: str) -> str:
    name = key.removeprefix(KEYS.prefix)
    return name if name == "fleet:requests" else name.partition(":")[0]


def families(words: str) -> set[str]:
    return {word.removesuffix(":*") for word in words.split()}


def sent_by(steps: Sequence[Step]) -> list[Command]:
    """The first commands of each step, but for the words around a transaction."""
    recorder = Recorder()
    for step in steps:
        with contextlib.suppress(Asked):
            asyncio.run(awaited(step(recorder)))
    return [command for command in recorder.commands if len(command) > 1]


async def awaited(work: Awaitable[Any]) -> None:
    await work


def scripts_of(commands: Sequence[Command]) -> list[tuple[str, list[str]]]:
    """Which scripts are called, and the families of their keys."""
    names = {script.sha: name for name, script in SCRIPTS.items()}
    return [
        (names[str(sha)], [family(str(key)) for key in words[1 : 1 + int(str(words[0]))]])
        for verb, sha, *words in commands
        if verb == "EVALSHA"
    ]


def direct_uses(commands: Sequence[Command]) -> set[Use]:
    found: set[Use] = set()
    for verb, *words in commands:
        if verb != "EVALSHA":
            key = next(str(word) for word in words if str(word).startswith(KEYS.prefix))
            found.add(Use(str(verb).lower(), frozenset({family(key)})))
    return found


def is_granted(role: Role, use: Use) -> bool:
    """The role itself is a selector too: its commands, on the keys that its scripts may be called with."""
    selectors = [(role.commands, role.script_keys), *((grant.commands, grant.keys) for grant in role.grants)]
    return any(use.command in commands.split() and use.families <= families(keys) for commands, keys in selectors)


@pytest.mark.parametrize("role", STEPS)
def test_a_role_may_send_every_command_of_its_scripts_on_the_keys_where_they_send_it(role: str) -> None:
    """A collector might send XRANGE and XACK, but to groups only; so each foreign result stayed for ever."""
    commands = sent_by(STEPS[role])
    refused = {
        f"{name}: {use.command} on {', '.join(sorted(use.families))}"
        for name, keys in scripts_of(commands)
        for use in uses_of(SCRIPTS[name].source, keys)
        if not is_granted(ROLES[role], use)
    }
    assert refused == set()
    assert {use for use in direct_uses(commands) if not is_granted(ROLES[role], use)} == set()


@pytest.mark.parametrize("role", STEPS)
def test_a_role_may_call_its_scripts_with_all_their_keys(role: str) -> None:
    for name, keys in scripts_of(sent_by(STEPS[role])):
        assert {*keys} <= families(ROLES[role].script_keys), name


def test_every_script_is_some_roles() -> None:
    commands = sent_by([step for steps in STEPS.values() for step in steps])
    assert {name for name, _ in scripts_of(commands)} == {*SCRIPTS}


def test_what_a_function_of_the_scripts_does_is_done_to_the_keys_that_it_is_given() -> None:
    uses = uses_of(SCRIPTS["set_aside"].source, ["results", "dead", "events"])
    assert {(use.command, *use.families) for use in uses} == {
        ("xrange", "results"), ("xack", "results"), ("xdel", "results"), ("xadd", "dead"), ("xadd", "events"),
        ("xlen", "dead"), ("xtrim", "dead"), ("memory|usage", "dead"),
    }  # fmt: skip

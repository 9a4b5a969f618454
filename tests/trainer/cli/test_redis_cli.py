"""The README's "Look at it with redis-cli": its very commands, on a half-finished batch, say what inspection says."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.inspection import RunState, inspect_run
from rolloutbus.trainer.cli.targets import connected, observer_settings

from .conftest import ROUTE, RUN, SHARD, Stage, comes_true, redis_at, rows_of, take

README = Path(__file__).parents[3] / "README.md"
HEADING = "## Look at it with redis-cli"
# Until the README has the section; the test says when it has.
COMMANDS = (
    """redis-cli -p "$REDIS_PORT" XLEN 'rolloutbus:{exp1}:groups:math'""",
    """redis-cli -p "$REDIS_PORT" XINFO GROUPS 'rolloutbus:{exp1}:groups:math'""",
    """redis-cli -p "$REDIS_PORT" XPENDING 'rolloutbus:{exp1}:groups:math' workers""",
    """redis-cli -p "$REDIS_PORT" HGETALL "rolloutbus:{exp1}:batch:$BATCH\"""",
    """redis-cli -p "$REDIS_PORT" XRANGE 'rolloutbus:{exp1}:groups:math' - + COUNT 1""",
    """redis-cli -p "$REDIS_PORT" HGETALL 'rolloutbus:{exp1}:instance:math'""",
)


def documented() -> tuple[str, ...]:
    """The commands of the README's section, or those that it is to have."""
    _, found, section = README.read_text(encoding="utf-8").partition(HEADING)
    if not found:
        return COMMANDS
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return tuple(line for line in block[1].splitlines() if line.startswith("redis-cli"))


class Shell:
    """Runs documented commands as a reader would, with the variables that the section names."""

    def __init__(self, broker: EmbeddedBroker, batch: str) -> None:
        port = str(urlsplit(broker.url).port)
        self._environment = {
            "PATH": os.environ["PATH"], "REDIS_PORT": port, "REDISCLI_AUTH": str(broker.password), "BATCH": batch,
        }  # fmt: skip

    def lines(self, command: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", command], env=self._environment, capture_output=True, check=True, timeout=20
        )
        return done.stdout.decode(errors="replace").splitlines()

    def pairs(self, command: str) -> dict[str, str]:
        words = self.lines(command)
        return dict(zip(words[::2], words[1::2], strict=False))


def look(broker: EmbeddedBroker) -> RunState:
    async def do() -> RunState:
        async with connected(observer_settings(broker.url)) as link:
            return await inspect_run(link, RUN)

    return asyncio.run(do())


def test_the_documented_commands_are_the_known_ones() -> None:
    assert documented() == COMMANDS


@pytest.mark.tools("redis-cli")
def test_what_redis_cli_prints_is_what_inspection_says(stage: Stage, broker: EmbeddedBroker) -> None:
    stage.instance(slots=2)
    batch = stage.batch(rows_of("ok", "wait", "wait", "ok", "fail"))
    stage.sealed(batch)
    take(batch, 1)
    comes_true(lambda: stage.status(batch, 1) == stage.status(batch, 2) == "running")
    comes_true(lambda: stage.redis.hget(stage.keys.instance(SHARD), "running") == "2")
    state = look(broker)
    (shard,), (seen,) = state.shards, state.batches
    shell = Shell(broker, batch.id)
    xlen, groups, pending, record, oldest, instance = documented()

    assert shell.lines(xlen) == [str(shard.unfinished)] == ["4"]
    found = shell.pairs(groups)
    assert (found["name"], found["pending"], found["consumers"]) == ("workers", str(shard.running), "1")
    summary = shell.lines(pending)
    assert (summary[0], summary[4]) == (str(shard.running), str(shard.instances[0].running))
    assert summary[3].startswith(f"{SHARD}:")
    found = shell.pairs(record)
    for name in ("state", "client", "groups", "rows", "published", "completed", "failed"):
        assert found[name] == str(getattr(seen, name))
    statuses = [value.split()[0] for name, value in found.items() if name.startswith("g:")]
    assert {status: statuses.count(status) for status in statuses} == seen.statuses
    found = shell.pairs(f"{oldest} | tail -n +2")
    assert (found["batch"], found["group"], found["route"], found["rows"]) == (batch.id, "1", ROUTE, "2")
    found = shell.pairs(instance)
    (alive,) = shard.instances
    for name in ("host", "pid", "running", "slots"):
        assert found[name] == str(getattr(alive, name))


def test_only_the_payload_is_binary(stage: Stage) -> None:
    stage.instance(slots=1)
    batch = stage.batch(rows_of("wait"))
    comes_true(lambda: stage.status(batch, 0) == "running")
    with redis_at(stage.url, decode=False) as raw:
        ((_, fields),) = raw.xrange(stage.keys.groups(SHARD), "-", "+", count=1)
    binary = [
        name.decode() for name, value in fields.items() if not value.isascii() or not value.decode().isprintable()
    ]
    assert binary == ["payload"]

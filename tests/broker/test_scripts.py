"""The Lua sources as they are put together."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from rolloutbus.broker import scripts
from rolloutbus.broker.channel import Channel
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.scripts import SCRIPTS, load_scripts
from rolloutbus.broker.settings import BrokerSettings

ADDING = {"open", "publish"}


def test_each_transition_is_a_file_and_known_by_the_hash_of_its_whole_source():
    files = {path.stem for path in (Path(scripts.__file__).parent / "lua").glob("*.lua")}
    assert set(SCRIPTS) == files - {"prelude", "keep_letter", "bury", "purge"}
    for script in SCRIPTS.values():
        assert script.sha == hashlib.sha1(script.source.encode()).hexdigest()


def test_a_call_names_its_keys_first():
    assert SCRIPTS["own"].call(["k"], "a", 1) == ("EVALSHA", SCRIPTS["own"].sha, 1, "k", "a", 1)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_what_a_script_calls_is_part_of_it(name: str):
    source = SCRIPTS[name].source
    for shared in ("keep_letter", "bury", "purge"):
        assert (f"{shared}(" in source) == (f"local function {shared}(" in source)
    assert source.count("local function now_ms") == 1


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_everything_that_frees_or_finishes_work_runs_at_maxmemory(name: str):
    first = SCRIPTS[name].source.partition("\n")[0]
    assert (first == "#!lua flags=allow-oom") == (name not in ADDING)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_no_script_sets_a_global(name: str):
    """A global would break every later script where there is no sandbox, and is an error where there is one."""
    body = re.sub(r"--.*", "", SCRIPTS[name].source)
    assigned = re.findall(r"^(?!\s*local\b)\s*([A-Za-z_]\w*)(?:,\s*[A-Za-z_]\w*)*\s*=[^=]", body, re.MULTILINE)
    declared = set(re.findall(r"\b(?:local|for)\s+(?:function\s+)?([\w, ]+?)\s*(?:=|in\b|\(|\n)", body))
    names = {part.strip() for group in declared for part in group.split(",")}
    assert set(assigned) <= names


@pytest.mark.parametrize("make", ["valkey", "redis_7"])
async def test_servers_know_the_scripts_after_loading(make: str, request: pytest.FixtureRequest):
    broker: EmbeddedBroker = request.getfixturevalue(make)
    channel = await Channel.open(BrokerSettings(url=broker.url), "test")
    await load_scripts(channel)
    shas = [script.sha for script in SCRIPTS.values()]
    assert await channel.execute("SCRIPT", "EXISTS", *shas) == [1] * len(shas)
    await channel.close()

"""`doctor`: looks at the broker and every run on it, and says what is wrong and how to mend it."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ...broker.channel import Link, ReplyError
from ...broker.errors import BrokerError, BrokerTimeoutError, BrokerUnavailableError, RolloutBusError
from ...broker.inspection import decoded, find_runs, inspect_run, scan
from ...broker.keys import GROUP_NAME, Keys
from ...broker.settings import BrokerSettings, redacted
from ...broker.steps import ask
from .console import new_table, print_json, show_table, shown
from .diagnosis import (
    SETTINGS_READ,
    Finding,
    KeyFact,
    check_clock,
    check_groups,
    check_keys,
    check_run,
    check_server,
    check_settings,
)
from .guard import FAILED
from .targets import AsJson, BrokerUrl, connected, observer_settings

_STYLES = {"ok": "green", "unknown": "dim", "warning": "yellow", "wrong": "bold red"}
_GROUPS = ":groups:"

DoctorConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="Check this config's `rolloutbus.broker` times too.", show_default=False
    ),
]


def doctor(broker_url: BrokerUrl = None, config: DoctorConfig = None, as_json: AsJson = False) -> None:
    """Check the broker: version, persistence, eviction, memory, timeouts, clock, hash tags, stale runs. Exit code 1 if
    something is wrong.

    Example: rolloutbus doctor --broker-url redis://broker:6379/0
    """
    url, settings = broker_url, BrokerSettings()
    if config is not None:
        from ...shard_workers.fleet_config import read_fleet_config
        from .config import configured_url, load_config

        root = load_config(config, None)
        url, settings = configured_url(root, broker_url), read_fleet_config(root).broker
    findings = asyncio.run(examine(observer_settings(url), settings))
    if as_json:
        print_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        show_table(_table(findings))
    if any(finding.level == "wrong" for finding in findings):
        raise typer.Exit(FAILED)


async def examine(connection: BrokerSettings, settings: BrokerSettings) -> list[Finding]:
    """All findings; `settings` are those of the run's processes. A broker that cannot be used is a finding as well."""
    try:
        async with connected(connection) as link:
            return await _examine(link, settings)
    except (BrokerUnavailableError, BrokerTimeoutError) as error:
        remedy = "start the broker, or say where it is; one that runs and does not answer is stopped or overloaded"
        return [Finding("connection", "wrong", str(error), remedy)]
    except BrokerError as error:
        return [Finding("connection", "wrong", f"{redacted(connection.url)}: {error}", "mend what the broker refuses")]


async def _examine(link: Link, settings: BrokerSettings) -> list[Finding]:
    info = _info((await ask(link, [("INFO", "everything")]))[0])
    offset_s, round_trip_s = await _clock(link)
    runs = await find_runs(link)
    states = [await inspect_run(link, run) for run in runs]
    facts = await _key_facts(link)
    findings = [*check_server(info, await _config(link), settings), check_settings(settings)]
    findings += check_clock(offset_s, round_trip_s, socket.gethostname(), states)
    findings += check_keys(facts, [Keys(run).prefix for run in runs])
    findings += check_groups(await _without_group(link, facts))
    for state in states:
        findings += check_run(state, settings)
    return findings


def _info(raw: bytes) -> dict[str, str]:
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def _config(link: Link) -> dict[str, str] | None:
    """The few settings that INFO does not tell, where this user may read them."""
    found: dict[str, str] = {}
    for reply in await link.run([("CONFIG", "GET", name) for name in SETTINGS_READ]):
        if isinstance(reply, ReplyError):
            return None
        found |= decoded(reply)
    return found


async def _clock(link: Link) -> tuple[float, float]:
    """The broker's clock minus ours, and the round trip: of five tries the quickest, which is the most exact."""
    tries: list[tuple[float, float]] = []
    for _ in range(5):
        before = time.time()
        now: Any = (await ask(link, [("TIME",)]))[0]
        took = time.time() - before
        tries.append((took, int(now[0]) + int(now[1]) / 1e6 - before - took / 2))
    took, offset = min(tries)
    return offset, took


async def _key_facts(link: Link) -> list[KeyFact]:
    names = await scan(link, "rolloutbus:*")
    replies = await ask(link, [command for name in names for command in (("TYPE", name), ("PTTL", name))])
    facts = zip(names, replies[::2], replies[1::2], strict=True)
    # A key that expired since the scan says so with -2, and so does a name that is no text, which is to be told.
    return [
        KeyFact(name, kind if isinstance(kind, str) else kind.decode(), ttl)
        for name, kind, ttl in facts
        if ttl != -2 or "\ufffd" in name
    ]


async def _without_group(link: Link, facts: Sequence[KeyFact]) -> list[str]:
    streams = [fact.name for fact in facts if fact.kind == "stream" and _GROUPS in fact.name]
    missing: list[str] = []
    for stream in streams:
        try:
            groups = (await ask(link, [("XINFO", "GROUPS", stream)]))[0]
        except RolloutBusError:
            continue
        if GROUP_NAME.encode() not in [word for group in groups for word in group]:
            missing.append(stream)
    return missing


def _table(findings: Sequence[Finding]) -> Table:
    table = new_table("", ("", "check", "finding"))
    for finding in findings:
        words = Text(shown(finding.what))
        if finding.remedy:
            words.append(f"\nremedy: {shown(finding.remedy)}", style="dim")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, words)
    return table

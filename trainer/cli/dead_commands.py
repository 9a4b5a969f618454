"""`dead list`, `show`, `replay` and `drop`: groups that failed for good, always whole."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ...broker.channel import Link
from ...broker.dead_letters import DeadLetter, drop_dead_letters, find_dead_letter, read_dead_letters, read_rows
from ...broker.errors import (
    BatchError,
    ConfigError,
    DecodeError,
    EncodeError,
    RowError,
    RowTypeError,
    UnknownBatchError,
)
from ...broker.keys import Keys
from ...broker.messages import ReplayOrigin
from ...broker.settings import BrokerSettings
from ...broker.wording import counted, excerpt
from .. import CompletedGroup, RolloutClient
from .console import add_row, clock, new_table, out, print_json, say, show_table, size, write_json
from .guard import FAILED
from .interrupts import CANCELLING, Interrupts
from .result_lines import completed_lines, failed_lines, plain, to_json
from .targets import AsJson, BrokerUrl, RunName, connected, observer_settings, on_run, the_run

_COLUMNS = ("id", "buried UTC", "group", "route", "rows", "failure")
_FLEET_WAIT_S = 5.0
# What the worker stamps into a row; it belongs to one attempt.
_GROUP_ID = "_group_id"
# No rows, rows of another's making, a route that nobody hosts, a batch that somebody cancelled.
_OF_ONE_LETTER = (DecodeError, RowError, RowTypeError, EncodeError, BatchError)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="LETTER", help="An id from `dead list`, or BATCH:GROUP.", show_default=False),
]
Everything = Annotated[bool, typer.Option("--all", help="All letters of the run.", show_default=False)]


def list_letters(broker_url: BrokerUrl = None, run: RunName = None, as_json: AsJson = False) -> None:
    """List the run's dead letters, oldest first: the newest 1,000 or so, as far as `max_dead_bytes` has room.

    Example: rolloutbus dead list --run exp1
    """
    letters = on_run(broker_url, run, read_dead_letters)
    if as_json:
        print_json({"dead_letters": [_as_plain(letter) for letter in letters]})
        return
    if not letters:
        out.print("no dead letters")
        return
    table = new_table("", _COLUMNS, ("rows",), whole=("id", "group"))
    for letter in letters:
        failure = f"{letter.failure.type}: {letter.failure.message}" if letter.failure else letter.reason
        add_row(
            table,
            letter.entry,
            clock(letter.buried_ms, date=True)[5:],
            letter.group_id,
            letter.route,
            letter.rows,
            excerpt(failure, 120) + (f", {_told(letter.origin)}" if letter.origin else ""),
        )
    show_table(table)


def show_letter(
    letter: Annotated[str, typer.Argument(metavar="LETTER", help="An id from `dead list`, or BATCH:GROUP.")],
    rows: Annotated[
        bool,
        typer.Option(
            "--rows",
            help="The group's rows too: one JSON line each, or `rows_published` of --json.",
            show_default=False,
        ),
    ] = False,
    broker_url: BrokerUrl = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter: what failed where, with its traceback, and with --rows the rows as they were published.

    Example: rolloutbus dead show 1764444000000-0 --rows
    """

    async def read(link: Link, keys: Keys) -> tuple[DeadLetter, list[dict[str, Any]]]:
        found = await find_dead_letter(link, keys, letter)
        return found, await read_rows(link, keys, found) if rows else []

    found, kept = on_run(broker_url, run, read)
    if as_json:
        print_json(_as_plain(found) | ({"rows_published": plain(kept)} if rows else {}))
        return
    _describe(found)
    write_json(map(to_json, kept))


def _told(origin: ReplayOrigin) -> str:
    """`replay 2 of 5f0c:7`, under the name that the group was published with."""
    return f"replay {origin.replays} of {origin.group_id}"


def _describe(letter: DeadLetter) -> None:
    last = letter.first_row + letter.rows - 1
    out.print(f"dead letter {letter.entry}, buried {clock(letter.buried_ms, date=True)} UTC", style="bold")
    out.print(
        f"group {letter.group} of batch {letter.batch} (client {letter.client or '-'}), route {letter.route or '-'}"
    )
    if letter.origin:
        _describe_origin(letter.origin, letter.rows)
    out.print(
        f"rows {letter.first_row} to {last}, {size(letter.payload_bytes)}"
        if letter.payload_bytes
        else "its rows are not kept"
    )
    out.print(f"reason: {letter.reason}")
    if letter.instance not in ("", "-"):
        out.print(f"last attempt: {letter.attempt} on {letter.instance}")
    if letter.failure:
        status = f" (HTTP {letter.failure.http_status})" if letter.failure.http_status else ""
        out.print(
            f"{letter.failure.failure_class} failure: {letter.failure.type}: {letter.failure.message}{status}",
            style="red",
        )
        if letter.failure.traceback:
            out.print(letter.failure.traceback.rstrip())


def _describe_origin(origin: ReplayOrigin, rows: int) -> None:
    last = origin.first_row + rows - 1
    where = f"client {origin.client or '-'}, rows {origin.first_row} to {last}"
    out.print(f"{_told(origin)} ({where}), first buried as letter {origin.letter}")


def _as_plain(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.entry,
        "group_id": letter.group_id,
        "buried_ms": letter.buried_ms,
        **dataclasses.asdict(letter),
    }


def drop(
    names: Names = None, everything: Everything = False, broker_url: BrokerUrl = None, run: RunName = None
) -> None:
    """Delete dead letters for good.

    Example: rolloutbus dead drop 1764444000000-0
    """

    async def delete(link: Link, keys: Keys) -> int:
        letters = await _chosen(link, keys, names, everything)
        return await drop_dead_letters(link, keys, [letter.entry for letter in letters])

    out.print(f"{counted(on_run(broker_url, run, delete), 'dead letter')} dropped")


def replay(
    names: Names = None,
    everything: Everything = False,
    drop_replayed: Annotated[
        bool, typer.Option("--drop", help="Drop the letters whose group completes this time.", show_default=False)
    ] = False,
    broker_url: BrokerUrl = None,
    run: RunName = None,
) -> None:
    """Run dead groups again, each as a batch of its own on the running fleet, and print what comes back as JSON lines,
    each with the `group_id` that `dead list` shows, its `letter`, and in `origin` what was buried first.

    Exit code 1 when a group fails again, and its new dead letter, which tells the same origin, takes the old one's
    place, or cannot run at all: its rows are not kept, or nobody hosts its route. The trainer that published it hears
    nothing of this.

    Example: rolloutbus dead replay 1764444000000-0 --drop
    """
    settings = observer_settings(broker_url)
    with Interrupts(CANCELLING) as interrupts:
        failed, unable = interrupts.run(lambda: _replay(settings, run, names, everything, drop_replayed))
    if failed:
        say(f"{counted(failed, 'group')} failed again", "red")
    if unable:
        say(f"{counted(unable, 'group')} cannot run again; `rolloutbus dead drop` deletes their letters", "red")
    if failed or unable:
        raise typer.Exit(FAILED)


async def _replay(
    settings: BrokerSettings, run: str | None, names: Sequence[str] | None, everything: bool, drop_replayed: bool
) -> tuple[int, int]:
    """How many groups failed again, and how many could not run."""
    failed = unable = 0
    async with connected(settings) as link:
        keys = await the_run(link, run)
        letters = await _chosen(link, keys, names, everything)
        client = f"replay-{secrets.token_hex(4)}"
        async with RolloutClient.connect(settings.url, run=keys.run, client=client, fleet_wait_s=_FLEET_WAIT_S) as bus:
            for letter in letters:
                try:
                    completed, batch = await _run_again(bus, letter, await read_rows(link, keys, letter))
                except _OF_ONE_LETTER as error:
                    # The others can run all the same, and one that never can is among the oldest every time.
                    say(f"letter {letter.entry} (group {letter.group_id}): {error}", "red")
                    unable += 1
                    continue
                failed += not completed
                if drop_replayed if completed else await _is_buried(link, keys, batch):
                    await drop_dead_letters(link, keys, [letter.entry])
    return failed, unable


async def _is_buried(link: Link, keys: Keys, batch: str) -> bool:
    """Whether the batch's group is a dead letter, with its rows."""
    try:
        return (await find_dead_letter(link, keys, f"{batch}:0")).payload_bytes > 0
    except UnknownBatchError:
        return False


async def _run_again(bus: RolloutClient, letter: DeadLetter, rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether the group completed, and the batch that it was."""
    for row in rows:
        row.pop(_GROUP_ID, None)
    completed = False
    origin = letter.next_origin
    marks = {"group_id": letter.group_id, "letter": letter.entry, "origin": dataclasses.asdict(origin)}
    async with bus.replay(rows, origin) as batch:
        of = f", {_told(origin)}" if letter.origin else ""
        say(f"group {letter.group_id} ({counted(len(rows), 'row')}) runs again as batch {batch.id}{of}")
        async for outcome in batch:
            completed = isinstance(outcome, CompletedGroup)
            write_json(
                completed_lines(outcome, **marks)
                if isinstance(outcome, CompletedGroup)
                else failed_lines(outcome, rows, **marks)
            )
            if not isinstance(outcome, CompletedGroup):
                say(f"{outcome.type}: {outcome.message}", "red")
    return completed, batch.id


async def _chosen(link: Link, keys: Keys, names: Sequence[str] | None, everything: bool) -> list[DeadLetter]:
    if bool(names) == everything:
        raise ConfigError("say which dead letters: their ids from `rolloutbus dead list`, or --all")
    if everything:
        return await read_dead_letters(link, keys)
    return [await find_dead_letter(link, keys, name) for name in names or ()]

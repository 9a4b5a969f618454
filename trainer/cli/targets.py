"""Which broker, which run and which batch a command means, and the options that say so.

Broker: `--broker-url`, else REDIS_URL, else the config's `rolloutbus.broker.url`, else what redis-cli would take. Run:
`--run`, else the only one there is. Batch: its id, or the beginning of it that no other one has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

import typer

from ...broker.channel import Link
from ...broker.errors import BrokerUnavailableError, ConfigError
from ...broker.group_life import batches_there, known_batches
from ...broker.inspection import find_runs
from ...broker.keys import Keys
from ...broker.settings import BrokerSettings, broker_url
from ...broker.steps import ask

DEFAULT_URL = "redis://127.0.0.1:6379/0"
# Somebody sits in front of the screen.
_PATIENCE_S = 5.0
# Of a batch's id, where a command ends the batch: fewer are soon those of another one.
_ENOUGH_TO_END_IT = 8
_SHOWN = 10

Result = TypeVar("Result")

BrokerUrl = Annotated[
    str | None,
    typer.Option(
        "--broker-url",
        metavar="URL",
        help="The broker: redis://, rediss:// or unix://. Else REDIS_URL, which keeps a password out of process lists.",
        show_default=False,
    ),
]
RunName = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="The run on the broker; may be left out where there is only one.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", show_default=False)]


def observer_settings(url: str | None) -> BrokerSettings:
    """How a command that only looks connects: it gives up soon."""
    return BrokerSettings(
        url=broker_url(url) or DEFAULT_URL,
        connect_timeout_s=_PATIENCE_S,
        command_timeout_s=15.0,
        reconnect_timeout_s=_PATIENCE_S,
    )


@asynccontextmanager
async def connected(settings: BrokerSettings) -> AsyncGenerator[Link]:
    """A link that is open; raises at once what keeps it from opening."""
    link = Link(settings, "cli")
    try:
        await link.channel()
    except BrokerUnavailableError as error:
        hint = "" if settings.url != DEFAULT_URL else "; give --broker-url or set REDIS_URL"
        raise BrokerUnavailableError(f"{error}{hint}") from None
    try:
        yield link
    finally:
        await link.close()


def on_broker(url: str | None, work: Callable[[Link], Awaitable[Result]]) -> Result:
    """Connect, do `work`, disconnect."""

    async def do() -> Result:
        async with connected(observer_settings(url)) as link:
            return await work(link)

    return asyncio.run(do())


def on_run(url: str | None, run: str | None, work: Callable[[Link, Keys], Awaitable[Result]]) -> Result:
    """Connect, find the run, do `work`, disconnect."""

    async def do(link: Link) -> Result:
        return await work(link, await the_run(link, run))

    return on_broker(url, do)


async def the_run(link: Link, run: str | None) -> Keys:
    """The run called `run`, or the only one; raises `ConfigError` listing those there are."""
    runs = await find_runs(link)
    if run is None and len(runs) == 1:
        return Keys(runs[0])
    if run is not None and Keys(run).run in runs:
        return Keys(run)
    there = f"; there are: {', '.join(runs)}" if runs else "; there is none"
    if run is None:
        raise ConfigError(
            f"say which run with --run{there}"
            if runs
            else "there is no run on this broker; start one with `rolloutbus up`"
        )
    raise ConfigError(f"there is no run {run!r} on this broker{there}")


async def batch_to_explain(link: Link, keys: Keys, beginning: str) -> str:
    """The id that begins so of all batches that are known, those that are over too; see `the_only`."""
    # Keys and events are many, and need not be read for one that is named whole.
    if (await ask(link, [("EXISTS", keys.batch(beginning))]))[0]:
        return beginning
    return the_only(beginning, await known_batches(link, keys))


async def batch_to_cancel(link: Link, keys: Keys, beginning: str) -> str:
    """The id that begins so of the batches that are on the broker; see `the_only`."""
    return the_only(beginning, await batches_there(link, keys), _ENOUGH_TO_END_IT)


def the_only(beginning: str, known: Collection[str], least: int = 0) -> str:
    """The batch of that id, or the only one whose id begins so: with `least` characters at least, or whole.

    What nobody knows comes back as it is, for whoever looks for it to say so. Raises `ConfigError` with the candidates.
    """
    found = sorted(batch for batch in known if batch.startswith(beginning))
    if beginning in known or not found:
        return beginning
    there = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    if len(beginning) < least:
        raise ConfigError(
            f"{beginning!r} is too little of a batch's id to end the batch: give {least} characters at least, or the "
            f"whole id; so begin: {there}"
        )
    if len(found) > 1:
        raise ConfigError(f"{beginning!r} may be any of {len(found)} batches; give more of the id: {there}")
    return found[0]

"""`cancel`: ending a batch, whoever published it. It needs nothing but the broker."""

from __future__ import annotations

from typing import Annotated

import typer

from ...broker.channel import Link
from ...broker.client_transitions import cancel_batch
from ...broker.errors import UnknownBatchError
from ...broker.keys import Keys
from ...broker.steps import ask
from ...broker.wording import counted
from .console import out, print_json
from .targets import AsJson, BrokerUrl, RunName, batch_to_cancel, on_run


def cancel(
    batch: Annotated[
        str, typer.Argument(metavar="BATCH", help="The batch's id, or at least 8 characters of its beginning.")
    ],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Told to the batch's client.")
    ] = "rolloutbus cancel",
    broker_url: BrokerUrl = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a batch, whoever published it: its queued groups are dropped, running ones stopped, its client gets an
    error.

    Example: rolloutbus cancel 4f1c0a9be210 --reason "wrong checkpoint"
    """

    async def end(link: Link, keys: Keys) -> tuple[str, int | None]:
        whole = await batch_to_cancel(link, keys, batch)
        return whole, await end_batch(link, keys, whole, reason)

    whole, stopped = on_run(broker_url, run, end)
    if as_json:
        print_json({"batch": whole, "cancelled_groups": stopped or 0, "was_cancelled_before": stopped is None})
    elif stopped is None:
        out.print(f"batch {whole}: was cancelled before, and waits for its client to close it")
    else:
        out.print(f"batch {whole}: {counted(stopped, 'group')} cancelled")


async def end_batch(link: Link, keys: Keys, batch: str, reason: str) -> int | None:
    """Cancel whoever's batch; how many groups that stopped, None where somebody had cancelled it. Raises
    `UnknownBatchError`.
    """
    client, shards, state = (await ask(link, [("HMGET", keys.batch(batch), "client", "shards", "state")]))[0]
    if client is None:
        raise UnknownBatchError(f"run {keys.run!r} has no open batch {batch!r}; see `rolloutbus status`")
    if state == b"closed":
        return None
    # A record that somebody tampered with may lack any field, or hold anything.
    name, hosts = (word.decode(errors="replace") for word in (client, shards or b""))
    return await cancel_batch(link, keys, batch, name, hosts.split(), reason)

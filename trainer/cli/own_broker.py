"""The end of a command's own broker. A batch that is open then would wait for it in vain, as for one that restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ...broker.channel import Link
from ...broker.errors import RolloutBusError, UnknownBatchError
from ...broker.inspection import inspect_run
from ...broker.keys import Keys
from ...broker.wording import counted
from .cancel_command import end_batch
from .console import say
from .targets import on_broker

REASON = "`rolloutbus up` ended, and its own broker with it"
# For clients to hear of it and close their books; one that does nothing else has done so in milliseconds.
_PATIENCE_S = 3.0
# For those whose trainer ends with its batch: leaving a broker that has gone takes them longer.
_LEAVING_S = 0.5
_POLL_S = 0.02


@contextmanager
def batches_end_with_it(url: str, run: str) -> Generator[None]:
    """Around a fleet on a broker that ends with the command: once the fleet is gone, open batches are cancelled.

    Their clients get `BatchCancelledError`, and a moment to close them.
    """
    try:
        yield
    finally:
        try:
            ended = on_broker(url, lambda link: _end_batches(link, Keys(run)))
        except RolloutBusError as error:
            say(f"cannot tell clients of the broker's end: {error}", "yellow")
        else:
            if ended:
                batches = counted(ended, "open batch", "open batches")
                say(f"broker: ends with this command; {batches} cancelled, clients told")


async def _end_batches(link: Link, keys: Keys) -> int:
    """How many there were."""
    batches = [state for state in (await inspect_run(link, keys.run)).batches if state.state != "closed"]
    ended = [state for state in batches if await _cancelled(link, keys, state.batch)]
    if ended and await _are_gone(link, [keys.batch(state.batch) for state in ended], _PATIENCE_S):
        await _are_gone(link, [keys.owner(state.client) for state in ended], _LEAVING_S)
    return len(ended)


async def _are_gone(link: Link, keys: Sequence[str], patience_s: float) -> bool:
    """Whether all of them go within the time."""
    deadline = time.monotonic() + patience_s
    while (await link.run([("EXISTS", *keys)]))[0]:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _cancelled(link: Link, keys: Keys, batch: str) -> bool:
    """Whether it was still there."""
    try:
        await end_batch(link, keys, batch, REASON)
    except UnknownBatchError:
        return False
    return True

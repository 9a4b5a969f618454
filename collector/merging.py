"""Merging several result streams into one, in completion order. Pure asyncio: no broker, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, TypeVar

from ..broker.errors import RolloutBusError

Item = TypeVar("Item")


class SourceFailedError(RolloutBusError, RuntimeError):
    """One of the merged streams raised; its label is in the message, its error is the cause."""

    def __init__(self, label: str, error: BaseException) -> None:
        self.label = label
        super().__init__(f"the results of {label} ended with {type(error).__name__}: {error}")


async def merge_shard_streams(streams: Mapping[str, AsyncIterator[Item]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all `streams` (`{instance label: async iterator}`) as they complete.

    Raises `SourceFailedError` naming the stream that failed. Closed early, failing or cancelled, it cancels what is
    pending and closes every source before it returns.
    """
    pending: dict[asyncio.Future[Item], str] = {}
    # Each task reports itself here when it is done, so that their order is that of completion.
    finished: asyncio.Queue[asyncio.Future[Item]] = asyncio.Queue()

    def ask(label: str) -> None:
        task = _next(streams[label])
        pending[task] = label
        task.add_done_callback(finished.put_nowait)

    try:
        for label in streams:
            ask(label)
        while pending:
            task = await finished.get()
            label = pending.pop(task)
            try:
                item = task.result()
            except StopAsyncIteration:
                continue
            except (Exception, asyncio.CancelledError) as error:
                raise SourceFailedError(label, error) from error
            ask(label)
            yield item
    finally:
        await _close(pending, streams)


def _next(stream: AsyncIterator[Item]) -> asyncio.Future[Item]:
    async def step() -> Item:
        return await anext(stream)

    return asyncio.ensure_future(step())


async def _close(pending: Mapping[asyncio.Future[Any], str], streams: Mapping[str, AsyncIterator[Any]]) -> None:
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for stream in streams.values():
        close = getattr(stream, "aclose", None)
        if close is not None:
            await asyncio.gather(close(), return_exceptions=True)

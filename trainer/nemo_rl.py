"""`NemoRLEnvironment`: stands where NeMo RL keeps the handle of its Gym actor, and sends the rollouts over the broker
instead.

It has what that loop asks of the handle: `run_rollouts.options(num_returns="streaming").remote(…)`,
`health_check.remote()` and `shutdown()`. It pickles, connects at the first use in whatever process it has travelled
to, and serves one event loop after another.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from ..broker.errors import ClosedError, NoInstanceError, RowError
from ..broker.keys import check_name
from ..broker.routes import route_of
from ..broker.settings import BrokerSettings
from ..collector.timing import DEFAULT_PREFIX
from ..producer import RouteMap
from ..producer.rows import check_num_generations, shard_of
from .arguments import broker_settings, check_seconds
from .client import DEFAULT_FLEET_WAIT_S, RolloutClient
from .forks import forks
from .nemo_rl_stream import CallBatch, Feed, Part, RolloutStream

Row = dict[str, Any]
Result = TypeVar("Result")
# Opening a batch is a round trip or two; these many at once.
_OPENERS = 8


class NemoRLEnvironment:
    """One trainer's environment, for batches of `num_generations` rollouts per prompt.

    Groups are `_rowidx // num_generations`. A group that is not whole is refused, unless its shard says `rerun:
    missing`: failed rows are retried here, so set NeMo RL's `max_gym_row_attempts` to 1. Validation has other group
    sizes: give it `with_num_generations(1)`, which shares the connection.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        num_generations: int,
        client: str | None = None,
        settings: BrokerSettings | Mapping[str, Any] | None = None,
        fleet_wait_s: float = DEFAULT_FLEET_WAIT_S,
    ) -> None:
        """`client` is the trainer's name on the broker; without one each process that uses the object takes a new
        one.
        """
        check_num_generations(num_generations)
        check_name("run", run)
        if client is not None:
            check_name("client", client)
        check_seconds("fleet_wait_s", fleet_wait_s)
        given = broker_settings(url, settings)
        self._connection = _Connection(
            {"url": url, "run": run, "client": client, "settings": given, "fleet_wait_s": fleet_wait_s}
        )
        self._num_generations = num_generations

    @property
    def run_rollouts(self) -> RemoteRollouts:
        """`run_rollouts.options(num_returns="streaming").remote(rows, tokenizer, timer_prefix)` gives a
        `RolloutStream`.
        """
        return RemoteRollouts(self._connection, self._num_generations)

    @property
    def health_check(self) -> RemoteCheck:
        """`await health_check.remote()` returns when rollouts can run, and raises what is in the way otherwise."""
        return RemoteCheck(self._connection)

    def with_num_generations(self, num_generations: int) -> NemoRLEnvironment:
        """The same environment for batches with another group size, over the same connection."""
        check_num_generations(num_generations)
        other = object.__new__(NemoRLEnvironment)
        other._connection = self._connection
        other._num_generations = num_generations
        return other

    def shutdown(self) -> None:
        """Cancel what runs and disconnect; safe twice. The fleet is not touched: it is not this object's."""
        self._connection.close()


class RemoteRollouts:
    """The method as Ray would show it; `tokenizer` and `deduplicate_multimodal_data` are taken and not used.

    Post-processing with a tokenizer happens where the rollout ran: see the `actor_class` environment.
    """

    def __init__(self, connection: _Connection, num_generations: int) -> None:
        self._connection = connection
        self._num_generations = num_generations

    def options(self, *, num_returns: Literal["streaming"] = "streaming", **ignored: Any) -> RemoteRollouts:
        """Ray's options; anything but a streaming call is refused."""
        if num_returns != "streaming":
            raise ValueError(f'num_returns must be "streaming", but is {num_returns!r}: rollouts come one by one')
        return self

    def remote(
        self,
        rows: Sequence[Row],
        tokenizer: Any = None,
        timer_prefix: str = DEFAULT_PREFIX,
        deduplicate_multimodal_data: bool = False,
    ) -> RolloutStream:
        """Begin at once and return without waiting. What is wrong with the rows is raised when the first item is
        awaited.
        """
        del tokenizer, deduplicate_multimodal_data
        # Copies, because the client numbers its own rows from 0, and the caller may go on with its list at once.
        return RolloutStream(
            self._connection.submit(self._open, [{"_rowidx": at, **row} for at, row in enumerate(rows)], timer_prefix)
        )

    def _open(self, rows: list[Row], timer_prefix: str) -> Feed:
        client = self._connection.client()
        whole, single = split_rows(rows, self._num_generations)
        if single:
            _require_independent(single, client.route_map, self._num_generations)
        parts = [
            # The rows' own numbers first: opening renumbers them.
            Part(indices=[row["_rowidx"] for row in part], batch=client.open_rows(part, size))
            for part, size in ((whole, self._num_generations), (single, 1))
            if part
        ]
        return Feed(parts, timer_prefix)


class RemoteCheck:
    """`health_check` as Ray would show it."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def remote(self) -> Awaited:
        """Raises `ConnectionError` and `TimeoutError` kinds, `NoInstanceError` naming shards without a live instance
        among them.
        """
        return Awaited(self._check)

    async def _check(self) -> None:
        client = await self._connection.connected()
        await client.check()


class Awaited:
    """Something to await once; unlike a coroutine it may be dropped unawaited."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, None]:
        return self._work().__await__()


def split_rows(rows: Sequence[Row], num_generations: int) -> tuple[list[Row], list[Row]]:
    """Rows of whole groups, in group order, and the rest; raises `RowError` for no rows and for a `_rowidx` that
    stands twice.
    """
    groups: dict[int, dict[int, Row]] = {}
    for row in rows:
        index: int = row["_rowidx"]
        group = groups.setdefault(index // num_generations, {})
        if index in group:
            raise RowError(f"two rows of the call have _rowidx {index}; number the rows of a batch 0..N-1")
        group[index] = row
    if not groups:
        raise RowError("the call has no rows; give at least one")
    ordered = [[group[index] for index in sorted(group)] for _, group in sorted(groups.items())]
    whole = [row for group in ordered if len(group) == num_generations for row in group]
    return whole, [row for group in ordered if len(group) != num_generations for row in group]


def _require_independent(rows: Sequence[Row], route_map: RouteMap, num_generations: int) -> None:
    for row in rows:
        index: int = row["_rowidx"]
        shard = shard_of(route_of(row), route_map.routes, index)
        record = route_map.shards.get(shard)
        if record is None or record.rerun == "group":
            raise RowError(
                f"row {index} is of group {index // num_generations}, whose {num_generations} rows are not all here, "
                f"and shard {shard!r} runs whole groups (`rerun: group`). If this is NeMo RL's retry of single rows, "
                "set `max_gym_row_attempts: 1`, because retries are made here; for a validation set use "
                "with_num_generations(1)"
            )


class _Client(RolloutClient):
    """What the adapter needs beyond the public client."""

    @property
    def route_map(self) -> RouteMap:
        return self._engine.route_map

    def open_rows(self, rows: Sequence[Row], num_generations: int) -> CallBatch:
        return CallBatch(self._engine, self._begin(rows, num_generations, rows_mode=True), "yield", self._prefix)

    @property
    def ended(self) -> bool:
        """Whether it was connected, or tried to, and is of no use any more."""
        return self._engine.ended

    def ask_to_stop(self) -> None:
        """Begin to end it, connecting included, without waiting."""
        self._engine.ask_to_stop()

    async def check(self) -> None:
        await asyncio.wrap_future(self._engine.call(self._check()))

    async def _check(self) -> None:
        shards = (await self._engine.refresh_route_map()).shards
        labels = [(shard, label) for shard, record in shards.items() for label in record.instances(shard)]
        answers = await self._engine.link.run([("EXISTS", self._engine.keys.instance(label)) for _, label in labels])
        alive = {shard for (shard, _), found in zip(labels, answers, strict=True) if found}
        if missing := sorted(set(shards) - alive):
            raise NoInstanceError(
                f"no live instance of {', '.join(missing)} in run {self._engine.keys.run!r}; see `rolloutbus status`"
            )


class _Connection:
    """One client, made at the first use in a process, and again once it has ended. Pickled, it is the address alone.

    The lock is never held while anything is waited for: calls take it in their caller's event loop.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._reset()

    def _reset(self) -> None:
        self._forks = forks()
        self._guard = threading.Lock()
        self._client: _Client | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        return self._options

    def __setstate__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._reset()

    def client(self) -> _Client:
        """The connected client; blocks while it connects."""
        self._settle_in()
        with self._guard:
            self._require_open()
            if self._client is None or self._client.ended:
                options = dict(self._options)
                name = options.pop("client") or f"nemo-rl-{secrets.token_hex(6)}"
                self._client = _Client(**options, client=name)
            client = self._client
        return client.connect_now()

    async def connected(self) -> _Client:
        return await asyncio.wrap_future(self.submit(self.client))

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Run blocking work in one of the threads."""
        self._settle_in()
        with self._guard:
            self._require_open()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_OPENERS, thread_name_prefix="rolloutbus-open")
            return self._threads.submit(work, *arguments)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this environment was shut down; make a new one")

    def _settle_in(self) -> None:
        """A forked process has none of the threads, and the lock may be held for ever: it begins anew, as a pickled
        copy does.
        """
        if self._forks != forks():
            closed = self._closed
            self._reset()
            self._closed = closed

    def close(self) -> None:
        self._settle_in()
        with self._guard:
            client, threads = self._client, self._threads
            self._client = self._threads = None
            self._closed = True
        if client is not None:
            # One that waits for a fleet would hold its threads.
            client.ask_to_stop()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        if client is not None:
            client.close_now()

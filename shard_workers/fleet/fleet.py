"""`ShardFleet`: the environments of a run, as whoever starts them sees it. Plain, blocking calls; its own thread does
the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

from ...broker.errors import ClosedError, FleetError
from ...broker.settings import BrokerSettings
from ..fleet_config import ConfigSource, FleetConfig, read_fleet_config
from .engine import FleetEngine, shut_down
from .instances import InstanceStatus
from .loop_thread import LoopThread
from .placement import RaySession


class ShardFleet:
    """A running fleet, made by `start`, ended by `shutdown` or as a context manager; for use from any thread."""

    def __init__(self, config: FleetConfig, session: RaySession, thread: LoopThread) -> None:
        self._config = config
        self._session = session
        self._thread = thread
        self._engine: FleetEngine | None = None
        self._ended = threading.Event()
        self._end_reason = ""
        self._guard = threading.Lock()
        self._shut_down = False

    @classmethod
    def start(
        cls,
        config: ConfigSource | FleetConfig,
        base_urls: Any = None,
        model_name: str | None = None,
        *,
        replace: bool = False,
    ) -> ShardFleet:
        """Start every stack of `config` (a mapping, an OmegaConf node, or a YAML file's path) and publish what they
        host; blocks.

        `base_urls` and `model_name` are those of the model's endpoints. `replace` takes the run from another fleet once
        this one is up. Raises `ConfigError` before anything starts, `ShardSetupError` naming shard, replica and cause,
        or `FleetError` when the run has another fleet; then nothing is left running.
        """
        known = config if isinstance(config, FleetConfig) else read_fleet_config(config)
        session = RaySession(known)
        thread: LoopThread | None = None
        try:
            thread = LoopThread(f"rolloutbus-fleet-{known.run}")
            fleet = cls(known, session, thread)
            thread.run(fleet._start(base_urls, model_name, replace=replace))
        except BaseException:
            if thread is not None:
                thread.close()
            session.close()
            raise
        return fleet

    async def _start(self, base_urls: Any, model_name: str | None, *, replace: bool) -> None:
        self._engine = FleetEngine(
            self._config, base_urls, model_name, self._on_end, on_local_ray=self._session.is_local
        )
        await self._engine.start(replace=replace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return (
            f"<ShardFleet {self.run}: {', '.join(f'{shard} {len(labels)}' for shard, labels in self.labels.items())}>"
        )

    @property
    def config(self) -> FleetConfig:
        """What it was started with."""
        return self._config

    @property
    def run(self) -> str:
        return self._config.run

    @property
    def broker(self) -> BrokerSettings:
        return self._config.broker

    @property
    def route_map(self) -> Mapping[str, str]:
        """Route → shard, for `validate_dataset_routes`; `{"*": shard}` where the config is not sharded."""
        return MappingProxyType(self._engine.routes if self._engine else {})

    @property
    def labels(self) -> dict[str, list[str]]:
        """Shard → labels of its instances."""
        engine = self._engine
        return {shard.name: engine.labels(shard.name) if engine else [] for shard in self._config.plan.shards}

    def status(self) -> list[InstanceStatus]:
        """A look at every instance."""
        return [instance.status() for instance in self._engine.instances] if self._engine else []

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Block until the fleet has ended, at most `timeout_s`; why it did ("" after `shutdown`), or None while it
        runs.
        """
        return self._end_reason if self._ended.wait(timeout_s) else None

    def scale(self, shard: str, replicas: int) -> None:
        """Add instances, or drain and end the last ones, until there are `replicas`; blocks. No label of a running one
        changes.

        Raises `FleetError` or `ConfigError` with the reason; the instances there were go on.
        """
        self._change(self._running().scale(shard, replicas))

    def drain(self, label: str) -> None:
        """End one instance: its groups finish or are handed back. Raises `FleetError` for the last one of its shard."""
        self._change(self._running().drain(label))

    def shutdown(self, *, drain: bool = True, kill_after_s: float | None = None) -> None:
        """Drain and stop every instance, then give back places and keys; safe twice.

        `drain=False` hands running groups back at once. An interrupt, and the end of `kill_after_s`, kills what is left
        and then gives back the rest; the interrupt is raised again. Raises `FleetError` naming what would not stop, or
        had not by the end of `kill_after_s`; it was killed then.
        """
        with self._guard:
            if self._shut_down:
                return
            self._shut_down = True
            try:
                problems = self._end(drain, kill_after_s)
            finally:
                self._thread.close()
                self._session.close()
                self._ended.set()
        if problems:
            raise FleetError(
                f"{len(problems)} instances of run {self.run!r} would not stop and were killed: {'; '.join(problems)}"
            )

    def _end(self, drain: bool, kill_after_s: float | None) -> list[str]:
        if self._engine is None or not self._thread.alive:
            return []
        try:
            return self._thread.run(_end_in_time(self._engine, drain, kill_after_s))
        except KeyboardInterrupt:
            self._thread.run(self._engine.kill())
            raise

    def _running(self) -> FleetEngine:
        if self._engine is None or not self._thread.alive or self._shut_down:
            raise shut_down(self.run)
        return self._engine

    def _change(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self._thread.run(work)
        except ClosedError:
            raise shut_down(self.run) from None

    def _on_end(self, reason: str) -> None:
        self._end_reason = reason
        self._ended.set()


async def _end_in_time(engine: FleetEngine, drain: bool, kill_after_s: float | None) -> list[str]:
    """What would not stop, by name."""
    limit = asyncio.timeout(kill_after_s)
    try:
        async with limit:
            return await engine.shutdown(drain=drain)
    except TimeoutError:
        # It may be the broker's or somebody else's.
        if not limit.expired():
            raise
    return [f"{name} had not stopped after {kill_after_s:g} s" for name in await engine.kill()]

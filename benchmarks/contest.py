"""How a contestant is driven: a process that stays up, runs a repetition per line of input, answers in JSON.

So contestants take turns in one session on one machine, and starting up is nobody's cost. Rows are built here, before
the clocks of any contestant start. A contestant that ends or falls silent is a `BenchmarkError` that names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.meter import Meter
from benchmarks.payloads import make_rows

Rows = list[dict[str, Any]]
# The slowest repetition takes seconds; who needs minutes hangs.
ANSWER_WITHIN_S = 180.0
LEAVE_WITHIN_S = 30.0


class BenchmarkError(Exception):
    """A measurement that could not be made; the message says what failed, and where."""


@dataclass(frozen=True)
class Order:
    """One repetition: rows of `kind` as one batch.

    With `by_row` the product is asked for rows instead of whole groups. With `rate` (rows per second) every row is a
    batch of its own, at that pace.
    """

    kind: str
    rows: int
    shards: int = 2
    rate: float = 0.0
    by_row: bool = False


@dataclass
class Measurement:
    """What one repetition took. `cpu_s` and the megabytes are by process role: broker, workers, trainer.

    `before_mb` is resident memory when the rows were built and nothing was sent yet, `peak_mb` the most since then;
    where a role has several processes, of the largest.
    """

    rows_per_s: float
    first_ms: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    before_mb: dict[str, float] = field(default_factory=dict[str, float])
    peak_mb: dict[str, float] = field(default_factory=dict[str, float])
    overhead_ms: list[float] = field(default_factory=list[float])

    def growth_mb(self, role: str) -> float:
        """Peak memory beyond what was resident before."""
        return round(self.peak_mb[role] - self.before_mb[role], 1)


@dataclass
class Progress:
    """Counts what a consumer is given: how many rows, how fast, and when the first came."""

    started: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    rows: int = 0

    def add(self, rows: int = 1) -> None:
        self.first_s = self.first_s or time.perf_counter() - self.started
        self.rows += rows

    def measured(self, expected: int) -> Measurement:
        elapsed = time.perf_counter() - self.started
        if self.rows != expected:
            raise BenchmarkError(f"{self.rows} rows came back of {expected}")
        return Measurement(self.rows / elapsed, self.first_s * 1000)


Runner = Callable[[Order, Rows], Awaitable[Measurement]]


async def serve(run: Runner, roles: dict[str, list[int]]) -> None:
    """A contestant's main loop; `run` is all that is timed."""
    print("ready", flush=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        rows = make_rows(order.kind, order.rows, order.shards)
        gc.collect()
        meter = Meter(roles)
        measurement = await run(order, rows)
        measurement.cpu_s, measurement.before_mb, measurement.peak_mb = meter.cpu_s(), meter.before_mb, meter.peak_mb()
        print(json.dumps(asdict(measurement)), flush=True)


class Contestant:
    """The driver's hold on one contestant, `python -m benchmarks.MODULE ARGS…`; a context manager. All that it imports
    comes from `folder` first, where one is given.
    """

    def __init__(self, name: str, module: str, *args: str, folder: Path | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *args], cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)} if folder else None,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            self._answer("before it was ready", lambda line: line.strip() == "ready")
        except BenchmarkError:
            self.close()
            raise

    def run(self, order: Order) -> Measurement:
        """One repetition."""
        # Where it has ended, its answer that does not come tells.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(json.dumps(asdict(order)) + "\n")
            self._input.flush()
        return Measurement(**json.loads(self._answer(f"in the middle of {order}", lambda line: line.startswith("{"))))

    def close(self) -> None:
        """Ask it to leave, and see to it that it does."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(timeout=LEAVE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise BenchmarkError(f"{self.name} did not end within {LEAVE_WITHIN_S:g} s and was killed") from None
        finally:
            self._output.close()

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _answer(self, when: str, wanted: Callable[[str], bool]) -> str:
        """The next line that is wanted; what libraries print in between is passed over."""
        watchdog = threading.Timer(ANSWER_WITHIN_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._output:
                if wanted(line):
                    return line
        finally:
            silent = watchdog.finished.is_set()
            watchdog.cancel()
        how = f"was silent for {ANSWER_WITHIN_S:g} s" if silent else f"ended with code {self._process.wait()}"
        raise BenchmarkError(f"contestant {self.name} {how} {when}; its own error, if any, is above")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def paced(order: Order, one: Callable[[int], Coroutine[Any, Any, float]]) -> Measurement:
    """`one(index)` for each row when it is due at `order.rate`; it gives the milliseconds that were overhead."""
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        calls: list[asyncio.Task[float]] = []
        for index in range(order.rows):
            await asyncio.sleep(max(0.0, started + index / order.rate - time.perf_counter()))
            calls.append(tasks.create_task(one(index)))
    return Measurement(order.rate, overhead_ms=[call.result() for call in calls])

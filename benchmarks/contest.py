"""How a contestant is driven: a process that stays up, runs a repetition per line of input, answers in JSON.

So contestants take turns in one session on one machine, and starting up is nobody's cost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import psutil


@dataclass(frozen=True)
class Order:
    """One repetition: rows of `kind`; with `rate` (rows per second) single rows at that pace instead of one batch."""

    kind: str
    rows: int
    shards: int = 2
    rate: float = 0.0


@dataclass
class Measurement:
    """What one repetition took. Times in seconds unless named otherwise; `cpu_s` and `peak_mb` by process role."""

    rows_per_s: float
    first_row_ms: float
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    peak_mb: dict[str, float] = field(default_factory=dict[str, float])
    overhead_ms: list[float] = field(default_factory=list[float])


class Meter:
    """CPU time and memory of the processes of one contestant, by role; children count with their role."""

    def __init__(self, roles: dict[str, list[int]]) -> None:
        self._roles = roles
        self._before = {role: self._cpu(role) for role in roles}

    def _processes(self, role: str) -> list[psutil.Process]:
        found = [psutil.Process(pid) for pid in self._roles[role] if psutil.pid_exists(pid)]
        return found + [child for process in found if role != "trainer" for child in process.children(recursive=True)]

    def _cpu(self, role: str) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes(role))

    def cpu(self) -> dict[str, float]:
        return {role: round(self._cpu(role) - before, 4) for role, before in self._before.items()}

    def memory(self) -> dict[str, float]:
        return {
            role: round(sum(process.memory_info().rss for process in self._processes(role)) / 2**20, 1)
            for role in self._roles
        }


async def serve(run: Callable[[Order], Awaitable[Measurement]]) -> None:
    """A contestant's main loop."""
    print("ready", flush=True)
    for line in sys.stdin:
        measurement = await run(Order(**json.loads(line)))
        print(json.dumps(asdict(measurement)), flush=True)


class Contestant:
    """The driver's hold on one contestant, `python -m benchmarks.MODULE ARGS…`."""

    def __init__(self, name: str, module: str, *args: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._wait_for("ready")

    def _wait_for(self, word: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise SystemExit(f"{self.name} ended before it was {word}; its error is above")

    def run(self, order: Order) -> dict[str, Any]:
        """One repetition."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.name} ended in the middle of {order}; its error is above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pace(started: float, index: int, rate: float) -> float:
    """Seconds until row `index` is due."""
    return max(0.0, started + index / rate - time.perf_counter())

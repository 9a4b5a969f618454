"""`results.json`: the shape of what was measured, and how the results of one run join those of earlier ones.

A run replaces what it measured and leaves the rest; compared payloads are replaced one by one, but each with all its
peers, which are only comparable within a session. Results of another machine do not mix.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from benchmarks.contest import BenchmarkError, Measurement
from benchmarks.meter import PEAK_IS_TRUE
from benchmarks.stage import server


class Machine(BaseModel):
    """Where results were made."""

    cpu: str
    cores: int
    system: str
    python: str
    server: str
    ray: str
    peak_is_true: bool


class Compared(BaseModel):
    """Repeats of one payload by peer, in the order in which they took turns; `by_row` for peers with a row API."""

    rows: int
    batches: dict[str, list[Measurement]] = Field(default_factory=dict)
    by_row: dict[str, list[Measurement]] = Field(default_factory=dict)


class InstancesPoint(BaseModel):
    """Cost per row, wall time and CPU time of all processes, with so many workers."""

    shards: int
    replicas: int
    wall_us: float
    cpu_us: float


class CrowdPoint(BaseModel):
    """So many one-group batches at once through one client; the counts are taken while all are open."""

    batches: int
    batches_per_s: float
    p50_ms: float
    p99_ms: float
    connections: int
    tasks: int
    threads: int
    files: int
    keys_before: int
    keys_open: int
    keys_after: int


class HeldPoint(BaseModel):
    """Results that wait on the broker: how much, and by how much its memory grew for each byte of them."""

    kind: str
    outstanding_mb: float
    per_byte: float


class GrowthPoint(BaseModel):
    """One batch of so many rows: seconds, what the trainer held with the rows built, and its peak beyond that."""

    rows: int
    seconds: float
    held_mb: float
    growth_mb: float

    @property
    def us_per_row(self) -> float:
        return self.seconds / self.rows * 1e6


class MakespanPoint(BaseModel):
    """One drawing of durations: what is possible with and without knowing them, and what was measured. Seconds."""

    slots: int
    seed: int
    bound_s: float
    in_order_s: float
    pull_s: float
    static_s: float


class Results(BaseModel):
    """All that was measured on one machine; empty where nothing was."""

    machine: Machine
    compared: dict[str, Compared] = Field(default_factory=dict)
    low_load_ms: dict[str, list[float]] = Field(default_factory=dict)
    instances: list[InstancesPoint] = Field(default_factory=list[InstancesPoint])
    crowd: list[CrowdPoint] = Field(default_factory=list[CrowdPoint])
    growth: list[GrowthPoint] = Field(default_factory=list[GrowthPoint])
    held: list[HeldPoint] = Field(default_factory=list[HeldPoint])
    makespan: list[MakespanPoint] = Field(default_factory=list[MakespanPoint])

    @property
    def best_wall_us(self) -> float:
        """The cheapest arrangement's wall time per row."""
        return min(point.wall_us for point in self.instances)

    @property
    def best_cpu_us(self) -> float:
        """The cheapest arrangement's CPU time per row."""
        return min(point.cpu_us for point in self.instances)

    def joined(self, newer: Results) -> Results:
        """These results with those of a newer run in their places."""
        if self.machine != newer.machine:
            return newer
        measured = {name: getattr(newer, name) for name in type(self).model_fields if getattr(newer, name)}
        measured["compared"] = {**self.compared, **newer.compared}
        return self.model_copy(update=measured)


def load(path: Path) -> Results | None:
    """What the file holds; None where there is none. Raises `BenchmarkError` for what is no file of ours."""
    if path.is_dir():
        raise BenchmarkError(f"{path} is a folder; name a file in it, such as {path / 'results.json'}, with --out")
    if not path.exists():
        return None
    try:
        return Results.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BenchmarkError(
            f"{path} does not hold results of this version ({error.error_count()} differences); remove it, or name "
            "another file with --out"
        ) from None


def save(path: Path, newer: Results) -> Results:
    """Write the results, joined to those in the file, and return all of them."""
    older = load(path)
    results = newer if older is None else older.joined(newer)
    path.write_text(results.model_dump_json(indent=1), encoding="utf-8")
    return results


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_model(),
        cores=os.cpu_count() or 0,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        server=_server_version(),
        ray=importlib.metadata.version("ray"),
        peak_is_true=PEAK_IS_TRUE,
    )


def _cpu_model() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")


def _server_version() -> str:
    redis: Any = importlib.import_module("redis")
    with server() as broker, redis.Redis.from_url(broker.url) as connection:
        found: dict[str, Any] = connection.info("server")
    if "valkey_version" in found:
        return f"Valkey {found['valkey_version']}"
    return f"Redis {found['redis_version']}"

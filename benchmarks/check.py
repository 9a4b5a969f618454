"""What CI asks: is rolloutbus still faster than Ray by a floor? Ratios of a short run, never times.

A floor stands far enough under what is measured that a noisy machine passes, and above half of it, so that a halving
does not. It is only raised, or lowered with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.compare import compare, playing
from benchmarks.contest import Order
from benchmarks.figures import ratio
from benchmarks.results import Compared

FLOORS: dict[str, float] = {"1.5 KB": 5.5, "64 KB numpy": 2.4}
# Enough that starting a batch does not count, few enough that Ray is done in a minute.
ROWS: dict[str, int] = {"1.5 KB": 8_192, "64 KB numpy": 2_048}
REPEATS = 5


@dataclass(frozen=True)
class Verdict:
    """One floor and what was measured."""

    kind: str
    times_ray: float
    floor: float

    @property
    def passed(self) -> bool:
        return self.times_ray >= self.floor

    def __str__(self) -> str:
        found = f"{self.kind}: {self.times_ray:.1f} x Ray, floor {self.floor:.1f} x"
        if self.passed:
            return f"ok    {found}"
        return (
            f"SLOW  {found}; see if it stays with `python -m benchmarks compare --peers ray,unix --kinds "
            f"'{self.kind}'`, whose report has the CPU time of each process, and look there for what a row costs more "
            "than it did before; FLOORS stands in benchmarks/check.py"
        )


def verdicts(compared: Mapping[str, Compared], floors: Mapping[str, float]) -> list[Verdict]:
    """One per floor. The product is the peer `unix`."""
    return [
        Verdict(kind, ratio(compared[kind].batches["unix"], compared[kind].batches["ray"]).median, floor)
        for kind, floor in floors.items()
    ]


def check() -> bool:
    """Measure and print; whether all floors hold."""
    with playing(["ray", "unix"]) as players:
        compared = {kind: compare(players, Order(kind, ROWS[kind]), REPEATS) for kind in FLOORS}
    found = verdicts(compared, FLOORS)
    for verdict in found:
        print(verdict)
    return all(verdict.passed for verdict in found)

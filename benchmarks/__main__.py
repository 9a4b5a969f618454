"""`python -m benchmarks`: rolloutbus beside its peers, in turns, on this machine; ratios count, not rates.

Writes `benchmarks/results.json` and prints the table of the README.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Generator
from pathlib import Path
from typing import Any

from benchmarks.contest import Contestant, Order
from benchmarks.payloads import KINDS

# Kind → contestant → measurements.
Found = dict[str, dict[str, list[dict[str, Any]]]]
LOW_LOAD = Order("1.5 KB", 400, shards=1, rate=200.0)


def contestants(names: list[str]) -> dict[str, tuple[str, ...]]:
    known = {
        "ray": ("ray_streams",),
        "bare": ("bare_redis",),
        "unix": ("product", "unix"),
        "tcp": ("product", "tcp"),
        "aof": ("product", "aof"),
    }
    return {name: known[name] for name in names}


@contextlib.contextmanager
def running(names: list[str]) -> Generator[dict[str, Contestant], None, None]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Contestant(name, *spec)) for name, spec in contestants(names).items()}


def measure(names: list[str], kinds: list[str], repeats: int, scale: float) -> Found:
    """Kind → contestant → measurements, contestants in turns, after one warm-up each."""
    found: Found = {}
    with running(names) as players:
        for kind in kinds:
            order = Order(kind, max(64, int(KINDS[kind][1] * scale)) // 32 * 32)
            found[kind] = {name: [] for name in players}
            for repeat in range(repeats + 1):
                for name, player in players.items():
                    measurement = player.run(order)
                    if repeat:
                        found[kind][name].append(measurement)
        found["low load"] = {
            name: [player.run(LOW_LOAD)] for name, player in players.items() if name in ("ray", "unix", "tcp")
        }
    return found


def rate(measurements: list[dict[str, Any]]) -> float:
    return statistics.median(measurement["rows_per_s"] for measurement in measurements)


def table(found: Found) -> str:
    """The figures as Markdown: rows per second as a multiple of Ray's with its range, milliseconds to the first row."""
    lines: list[str] = []
    names = list(next(iter(found.values())))
    lines.append(f"| rows of | {' | '.join(names)} | first row, ms ({' / '.join(names)}) |")
    lines.append("|---" * (len(names) + 2) + "|")
    for kind, by_name in found.items():
        if kind == "low load":
            continue
        base = rate(by_name["ray"]) if "ray" in by_name else 1.0
        cells = [_cell(by_name[name], base, name) for name in names]
        firsts = " / ".join(f"{statistics.median(m['first_row_ms'] for m in by_name[name]):.0f}" for name in names)
        lines.append(f"| {kind} | " + " | ".join(cells) + f" | {firsts} |")
    for name, measurements in found.get("low load", {}).items():
        overheads = sorted(measurements[0]["overhead_ms"])
        p50, p99 = overheads[len(overheads) // 2], overheads[int(len(overheads) * 0.99)]
        lines.append(
            f"\n{name}: at 200 rows/s a row is handed out {p50:.2f} ms (p50), {p99:.2f} ms (p99) after it is done."
        )
    return "\n".join(lines)


def _cell(measurements: list[dict[str, Any]], base: float, name: str) -> str:
    rates = [measurement["rows_per_s"] for measurement in measurements]
    if name == "ray":
        return f"{rate(measurements):,.0f} rows/s"
    return f"{rate(measurements) / base:.1f} × ({min(rates) / base:.1f} to {max(rates) / base:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--peers", default="ray,bare,unix,tcp,aof", help="who takes part")
    parser.add_argument("--kinds", default=",".join(KINDS), help="payloads, by name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the full number of rows")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results.json"))
    given = parser.parse_args()
    found = measure(given.peers.split(","), given.kinds.split(","), given.repeats, given.scale)
    given.out.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()

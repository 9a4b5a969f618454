"""`python -m benchmarks.against REV …`: the working tree beside what it was at other commits, in turns.

What a change gave: a machine is another one each hour, so only what ran in turns can be compared. Prints a table and
writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.compare import PEERS, order_of
from benchmarks.contest import BenchmarkError, Contestant, Measurement, Order
from benchmarks.figures import first_ms, rate
from benchmarks.payloads import COMPARED

ROOT = Path(__file__).parents[1]
NOW = "now"
TRANSPORTS = tuple(name for name, peer in PEERS.items() if peer[0] == "product")
COLUMNS = ("rows of", "revision", "rows/s", "of now", "CPU µs a row", "of now", "first ms")

Found = dict[str, list[Measurement]]


def archive_of(revision: str) -> bytes:
    """All that is committed there, as a tar archive."""
    try:
        done = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        raise BenchmarkError(f"{revision} cannot be had without git; install it") from None
    if done.returncode:
        raise BenchmarkError(f"{revision}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def tree_of(revision: str, folder: Path) -> Path:
    """A folder from which that revision's product and benchmarks are imported."""
    product = folder / "rolloutbus"
    product.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(product)], input=archive_of(revision), check=True)
    (folder / "benchmarks").symlink_to(Path("rolloutbus", "benchmarks"))
    return folder


def measure(revisions: Sequence[str], order: Order, repeats: int, transport: str) -> Found:
    """Repeats of one payload, all trees in turns, after one round of warm-up."""
    found: Found = {}
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="against-")))
        trees = {revision: tree_of(revision, base / str(at)) for at, revision in enumerate(revisions)}
        players = [
            stack.enter_context(Contestant(name, *PEERS[transport], folder=folder))
            for name, folder in {NOW: None, **trees}.items()
        ]
        for repeat in range(repeats + 1):
            # Forwards and back, so that none always follows the same one.
            for player in players if repeat % 2 else reversed(players):
                measured = player.run(order)
                if repeat:
                    found.setdefault(player.name, []).append(measured)
    return found


def cpu_us(measurement: Measurement, order: Order) -> float:
    """Of all processes together, per row."""
    return sum(measurement.cpu_s.values()) / order.rows * 1e6


def lines(found: Found, order: Order) -> list[list[str]]:
    """A line per tree; ratios are medians over the turns, each of which met the same machine."""
    made: list[list[str]] = []
    for name, measurements in found.items():
        turns = list(zip(measurements, found[NOW], strict=True))
        rates = statistics.median(mine.rows_per_s / now.rows_per_s for mine, now in turns)
        costs = statistics.median(cpu_us(mine, order) / cpu_us(now, order) for mine, now in turns)
        cost = statistics.median(cpu_us(mine, order) for mine in measurements)
        made.append(
            [order.kind, name, f"{rate(measurements):,.0f}", f"{rates:.3f} ×", f"{cost:.1f}", f"{costs:.3f} ×",
             f"{first_ms(measurements):.0f}"]
        )  # fmt: skip
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("revisions", nargs="+", metavar="REV", help="commits, branches or tags")
    parser.add_argument("--kind", action="append", choices=COMPARED, help="payload; may be given again (default: all)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each payload (default: 9)")
    parser.add_argument("--transport", choices=TRANSPORTS, default="unix")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the full number of rows")
    given = parser.parse_args()
    table = Table(*COLUMNS)
    try:
        for kind in given.kind or COMPARED:
            order = order_of(kind, given.scale)
            for line in lines(measure(given.revisions, order, given.repeats, given.transport), order):
                table.add_row(*line)
    except BenchmarkError as error:
        print(f"benchmarks.against failed: {error}", file=sys.stderr)
        return 1
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

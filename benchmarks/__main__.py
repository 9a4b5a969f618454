"""`python -m benchmarks`: rolloutbus measured on this machine, beside its peers and against its own goals.

Without a word it runs `compare`, `scaling` and `makespan`. Each adds to `results.json` and writes `report.md` and
`results.png` beside it anew; `report` only does the latter. `check` is a short comparison for CI that writes nothing
and fails where a ratio fell below its floor.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks import compare, plot, report
from benchmarks.check import check
from benchmarks.contest import BenchmarkError
from benchmarks.crowd import crowd
from benchmarks.held import held
from benchmarks.makespan import makespan
from benchmarks.payloads import COMPARED
from benchmarks.results import Results, load, save, this_machine
from benchmarks.scaling import growth, instances

PARTS = ("compare", "scaling", "makespan")


def names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """An option's type: names with commas between, each of which must be known."""

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return text.split(",")

    return parse


def at_least_one(text: str) -> int:
    """An option's type: a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("what", nargs="?", choices=[*PARTS, "check", "report"], help="default: the first three")
    peers = tuple(compare.PEERS)
    made.add_argument(
        "--peers", type=names_of(peers), default=",".join(compare.BY_DEFAULT), help=f"of {','.join(peers)}"
    )
    made.add_argument("--kinds", type=names_of(COMPARED), default=",".join(COMPARED), help="payloads, by name")
    made.add_argument("--repeats", type=at_least_one, default=5, help="of each payload (default: 5)")
    made.add_argument("--scale", type=float, default=1.0, help="fraction of the full number of rows")
    made.add_argument("--out", type=Path, default=Path("benchmarks/results.json"), help="what results are added to")
    return made


def measure(part: str, given: argparse.Namespace) -> Results:
    """The figures of one part."""
    found = Results(machine=this_machine())
    if part == "compare":
        found.compared, found.low_load_ms = compare.measure(given.peers, given.kinds, given.repeats, given.scale)
    elif part == "scaling":
        found.instances, found.crowd, found.growth = instances(given.scale), crowd(), growth(given.scale)
        found.held = held()
    else:
        found.makespan = makespan()
    return found


def publish(results: Results, out: Path) -> None:
    """The page, the picture and the terminal."""
    picture = out.with_suffix(".png")
    plot.draw(results, picture)
    report.write(results, out.with_name("report.md"), picture)
    report.show(results, Console())


def run(given: argparse.Namespace) -> bool:
    """Do what was asked for; whether all is well."""
    if given.what == "check":
        return check()
    # Before minutes of measuring, not after.
    results = load(given.out)
    plot.require()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for part in () if given.what == "report" else (given.what,) if given.what else PARTS:
        print(f"measuring: {part}", flush=True)
        results = save(given.out, measure(part, given))
    if results is None:
        raise BenchmarkError(f"there are no results in {given.out} yet; run `python -m benchmarks` first")
    publish(results, given.out)
    return True


def main() -> int:
    given = parser().parse_args()
    try:
        return 0 if run(given) else 1
    except BenchmarkError as error:
        reason = str(error)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}, as above"
    print(f"benchmarks: {given.what or 'all'} failed: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

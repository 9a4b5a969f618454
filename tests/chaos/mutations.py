"""Weakens one guard of the broker's scripts at a time, in a copy of the product, and shows which test notices; and
makes the worker dawdle in ways in which it once did, and shows which schedule notices.

`python -m tests.chaos.mutations [NAME …]` prints a line per guard and ends with 1 if one is noticed by nobody. The
copy is imported in place of the product through a meta path entry of its own, so nothing that is installed changes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("broker", "producer", "collector", "shard_workers", "trainer")
WORKER = "shard_workers/worker.py"
TESTS = ("tests/broker/contract", "tests/regressions/test_leases.py")

# The words of the verdict on waiting.
WAITED = re.compile(r"\S.* (?:was due|had been due|that were due waited) .*")


@dataclass(frozen=True)
class Mutation:
    """A guard in a script, or another file of the product: the line that holds it, and the line without it. `plays` are
    schedules, by fault and seed, of which one must notice where no test is asked.
    """

    name: str
    script: str
    guard: str
    weakened: str
    plays: tuple[tuple[str, int], ...] = ()

    @property
    def path(self) -> str:
        return self.script if "/" in self.script else f"broker/lua/{self.script}.lua"


MUTATIONS = (
    Mutation("publish: owner", "publish", "elseif h[2] ~= ARGV[1] then refusal = 'not-owner'", "elseif false then"),
    Mutation("publish: once", "publish", "elseif h[3] then refusal = 'repeated'", "elseif false then"),
    Mutation("publish: open", "publish", "if not h[1] or h[1] == 'closed' then refusal", "if false then refusal"),
    Mutation("seal: all published", "seal", "if h[3] ~= h[4] then return", "if false then return"),
    Mutation(
        "take: a dropped group keeps its record",
        "prelude",
        "r.status, r.token = 'abandoned', '-'\n  save(batch_key, group, r)",
        "redis.call('HDEL', batch_key, 'g:' .. group)",
    ),
    Mutation("accept: token", "accept", "or r.token ~= token or", "or"),
    Mutation("accept: running", "accept", "or r.status ~= 'running' then", "then"),
    Mutation(
        "accept: row once",
        "accept",
        "KEYS[2], bit, 1) == 1 then clash = true",
        "KEYS[2], bit, 1) == 2 then clash = true",
    ),
    Mutation("accept: group once", "accept", "clash = tonumber(before) ~= 0", "clash = false"),
    Mutation("accept: covers all rows", "accept", "(finish and r.accepted + new ~= rows)", "false"),
    Mutation("accept: ack with result", "accept", "drop_entry(KEYS[4], entry)", ""),
    Mutation("accept: undo what it refuses", "accept", "if has_results then undo(KEYS[3], added) end", ""),
    Mutation("renew: token", "renew", "elseif not r or r.token ~= ARGV[i + 3] then", "elseif not r then"),
    Mutation("renew: incarnation", "renew", "if known and known ~= ARGV[2]", "if false and known ~= ARGV[2]"),
    Mutation("fail: token", "fail", "or r.token ~= ARGV[6] or", "or"),
    Mutation("release: token", "release", "or r.token ~= ARGV[3] or", "or"),
    Mutation("take: own delivery", "take", "if #held == 0 or held[1][2] ~= ARGV[8] then", "if #held == 0 then"),
    Mutation("take: crash budget", "take", "if r.infra >= tonumber(ARGV[13]) then", "if false then"),
    Mutation("take: last chance alone", "take", "if suspect and runs_suspect(", "if false and runs_suspect("),
    Mutation("take: room is for what never ran", "take", "if absent and not first then", "if false then"),
    Mutation("claim: not where it failed", "claim", "if not failed_on[ARGV[2]] or", "if last ~= ARGV[2] or"),
    Mutation("claim: last chance alone", "claim", "if not (suspect and has_suspect) then", "if true then"),
    Mutation(
        "claim: lease",
        "claim",
        "if ARGV[5] == '1' and #out < limit then",
        "if ARGV[5] == '1' and #out < limit then lease_ms = 0",
    ),
    Mutation("own: one process", "own", "if holder ~= ARGV[1] and left > 0 then", "if false then"),
    Mutation("handed: owner", "handed", "if h[1] and h[2] ~= ARGV[1] then", "if false then"),
    Mutation("close: owner", "close", "if h[2] ~= ARGV[1] then", "if false then"),
    Mutation("expire: what is forgotten", "expire", "or not is_forgotten(KEYS[2], r.entry) then", "then"),
    Mutation("expire: a lease that runs", "expire", "held[1][3] < tonumber(ARGV[9])", "false"),
    Mutation("adopt: own client", "adopt", "if h[2] ~= ARGV[2] then", "if false then"),
    Mutation("adopt: sealed", "adopt", "if h[1] ~= 'sealed' then", "if false then"),
    Mutation(
        "waiting: a look each second",
        WORKER,
        "CLAIM_EVERY_S = 1.0",
        "CLAIM_EVERY_S = 5.0",
        (("kill-start", 8), ("kill-start", 36), ("kill-start", 50), ("kill-start", 73)),
    ),
    Mutation(
        "waiting: a look soon after something was put aside",
        WORKER,
        "elif outcome in COMES_AGAIN:",
        "elif False:",
        (("scale", 18), ("scale", 32), ("scale", 50), ("scale", 56)),
    ),
    Mutation(
        "waiting: what is due again before what is new",
        WORKER,
        "            async with self._slots.ahead():",
        "            while self._slots.used:\n                await asyncio.sleep(CLAIM_AGAIN_S)\n            if True:",
        (("scale", 2), ("scale", 227), ("scale", 117), ("scale", 281)),
    ),
)


def weakened_copy(mutation: Mutation, folder: Path) -> bool:
    """The product under `folder/rolloutbus`, without that guard; False where the guard is not there to be weakened."""
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / "rolloutbus" / part, ignore=shutil.ignore_patterns("__pycache__"))
    script = folder / "rolloutbus" / mutation.path
    text = script.read_text(encoding="utf-8")
    if mutation.guard not in text:
        return False
    script.write_text(text.replace(mutation.guard, mutation.weakened), encoding="utf-8")
    return True


def put_in_front(folder: Path) -> dict[str, str]:
    """The environment of a process that imports the weakened copy in place of the installed product."""
    # The installed finder answers for the name before sys.path does, so the copy is put in front of it.
    (folder / "sitecustomize.py").write_text(
        "import importlib.machinery, sys\n"
        f"class Copy:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        if name.split('.')[0] == 'rolloutbus':\n"
        f"            return importlib.machinery.PathFinder.find_spec(name, path or [{str(folder)!r}])\n"
        "sys.meta_path.insert(0, Copy)\n",
        encoding="utf-8",
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def ran(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def noticed_in(environment: dict[str, str], plays: Sequence[tuple[str, int]]) -> str:
    """The first of the schedules in which somebody waited too long, and who; or an empty string."""
    for fault, seed in plays:
        run = ran(environment, "tests.chaos", "--only", fault, "--seed", str(seed), "--schedules", "1")
        if waited := WAITED.search(run.stdout):
            return f"`{fault}` of seed {seed}: {waited[0]}"
    return ""


def noticed_by(environment: dict[str, str]) -> str:
    """The first test that fails, or an empty string."""
    run = ran(environment, "pytest", *TESTS, "-x", "-q", "--no-header", "-p", "no:cacheprovider")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed[1] if failed else ("" if run.returncode == 0 else f"pytest ended with {run.returncode}")


def check(mutation: Mutation) -> bool:
    """Print what came of one mutation; True when it was noticed."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        if not weakened_copy(mutation, Path(name)):
            print(f"| {mutation.name} | the guard is not where this file expects it |", flush=True)
            return False
        environment = put_in_front(Path(name))
        witness = noticed_in(environment, mutation.plays) if mutation.plays else noticed_by(environment)
    print(f"| {mutation.name} | {witness or 'NOTICED BY NOBODY'} |", flush=True)
    return bool(witness)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="only guards whose name contains one of these")
    names = parser.parse_args().names
    print("| guard weakened | noticed by |\n|---|---|")
    chosen = [one for one in MUTATIONS if not names or any(name in one.name for name in names)]
    noticed = [check(one) for one in chosen]
    return int(not all(noticed))


if __name__ == "__main__":
    sys.exit(main())

"""Another revision beside the working tree: it runs its own code, and the ratios are those of the same turn."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.contest import BenchmarkError, Contestant, Measurement, Order

CONTESTANT = b"""
import os, rolloutbus, sys
print("ready", flush=True)
sys.stdin.readline()
print('{"rows_per_s": 7.0, "first_ms": %d}' % list(rolloutbus.__path__)[0].startswith(os.getcwd()), flush=True)
"""


def archive(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def test_a_revision_runs_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "archive_of", {"old": archive("benchmarks/product.py", CONTESTANT)}.get)
    folder = against.tree_of("old", tmp_path / "tree")
    with Contestant("old", "product", "unix", folder=folder) as player:
        assert player.run(Order("tiny", 8)) == Measurement(7.0, 1.0)


def test_a_revision_that_there_is_not_is_named() -> None:
    with pytest.raises(BenchmarkError, match="no-such"):
        against.archive_of("no-such")


def test_ratios_are_those_of_the_same_turn() -> None:
    order = Order("tiny", 1000)
    now = [Measurement(at, 2.0, {"trainer": 0.01 * at}) for at in (100.0, 200.0, 1000.0)]
    old = [Measurement(at, 4.0, {"trainer": 0.02 * at}) for at in (50.0, 100.0, 500.0)]
    assert against.lines({"now": now, "old": old}, order) == [
        ["tiny", "now", "200", "1.000 ×", "2000.0", "1.000 ×", "2"],
        ["tiny", "old", "100", "0.500 ×", "2000.0", "1.000 ×", "4"],
    ]

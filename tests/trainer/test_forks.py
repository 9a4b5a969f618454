"""Runs `forking.py` in a process of its own: what other tests leave in this one, Ray's threads above all, cannot be
forked.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TIME_LIMIT_S = 120.0


def test_clients_and_batches_in_forked_processes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "forking.py")]
    ended = subprocess.run(
        command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 passed" in ended.stdout

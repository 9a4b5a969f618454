"""What the driver's child processes share: orders come on standard input, what happens goes out on standard output.

A child ends when its standard input does: the driver is gone then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn


def orders() -> dict[str, Any]:
    """The one line of orders; secrets in it show in no process title and no environment."""
    words = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_driver, daemon=True).start()
    return words


def _end_with_driver() -> None:
    sys.stdin.read()
    os._exit(3)


def tell(kind: str, **words: Any) -> None:
    """One event for the driver, with its time. One write per line, because several threads may tell."""
    os.write(1, json.dumps({"kind": kind, "at": now_ms(), **words}).encode() + b"\n")


def now_ms() -> float:
    """What all processes of a schedule mean by a time."""
    return time.time() * 1000


def die() -> NoReturn:
    """End as the OOM killer ends a process: here and now, with nothing cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process survived SIGKILL")

"""Telling a forked process from the one where an object was made: the parent's threads are not in it, and whoever waits
for one of them waits for ever.
"""

from __future__ import annotations

import os

_forks = 0


def forks() -> int:
    """How many forks lie between this process and the first one; asking costs no system call."""
    return _forks


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

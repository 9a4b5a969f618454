"""How a worker's process treats memory that was freed.

Results are large, short-lived, and come again and again. An allocator that hands each back to the system takes it again
page by page, which at 1 MB rows is a quarter of the worker's time (measured).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEEP_BYTES = 256 << 20
# The largest that glibc takes.
_HEAP_BELOW = 32 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep up to KEEP_BYTES of freed memory for itself, for good; False where that is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(_M_MMAP_THRESHOLD, _HEAP_BELOW))
    return False

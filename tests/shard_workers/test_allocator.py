"""What a worker tells its allocator."""

from __future__ import annotations

import platform

from rolloutbus.shard_workers.allocator import keep_freed_memory


def test_freed_memory_is_kept_where_the_allocator_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")

"""CPU time and peak memory of processes, by role, over one repetition. A process that is gone meanwhile is an error.

On Linux CPU time is exact and the peak is the kernel's own high-water mark, set back when the meter is made. Elsewhere
CPU time comes in clock ticks and the peak is what is resident at the end; `PEAK_IS_TRUE` says which.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ON_LINUX = sys.platform == "linux"
PEAK_IS_TRUE = ON_LINUX


class Meter:
    """Measures from its making on."""

    def __init__(self, roles: Mapping[str, Sequence[int]]) -> None:
        self._roles = roles
        for pid in (pid for pids in roles.values() for pid in pids):
            _reset_peak(pid)
        self.before_mb = {role: max(map(_resident_mb, pids)) for role, pids in roles.items()}
        self._cpu_before = self._cpu()

    def _cpu(self) -> dict[str, float]:
        return {role: sum(map(_cpu_s, pids)) for role, pids in self._roles.items()}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds since the meter was made, over all processes of a role."""
        return {role: round(now - self._cpu_before[role], 6) for role, now in self._cpu().items()}

    def peak_mb(self) -> dict[str, float]:
        """The peak of each role's largest process."""
        return {role: max(map(_peak_mb, pids)) for role, pids in self._roles.items()}


def _cpu_s(pid: int) -> float:
    if not ON_LINUX:
        return sum(psutil.Process(pid).cpu_times()[:2])
    clock = ctypes.c_int()
    if problem := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(problem, f"no CPU clock of process {pid}: {os.strerror(problem)}")
    return time.clock_gettime(clock.value)


def _resident_mb(pid: int) -> float:
    return round(psutil.Process(pid).memory_info().rss / 2**20, 1)


def _reset_peak(pid: int) -> None:
    if ON_LINUX:
        # "5" sets the high-water mark to what is resident now; see proc(5).
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _peak_mb(pid: int) -> float:
    if not ON_LINUX:
        return _resident_mb(pid)
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return round(int(kilobytes) / 1024, 1)

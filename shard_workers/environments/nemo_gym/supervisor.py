"""Guards the process tree of one Gym stack, as a small program of its own: `supervisor.py GRACE_S COMMAND…`.

It starts the command in its session and ends with it. When its standard input closes, because the worker stopped it
or was killed, it ends every descendant. Orphans become its children (a subreaper), so nothing escapes by outliving
its parent. It imports nothing of rolloutbus, to be there at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
_KILL_PATIENCE_S = 5.0
_LOOK_EVERY_S = 0.05


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies. Linux only; elsewhere orphans are found while
    their parent lives.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask for SIGTERM when the parent process dies, even by SIGKILL. Linux only."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_descendants(grace_s: float) -> list[int]:
    """End all descendants, politely for `grace_s` seconds and then by force; returns the pids that are left."""
    left = _signal_until_gone(signal.SIGTERM, grace_s)
    if left:
        left = _signal_until_gone(signal.SIGKILL, _KILL_PATIENCE_S)
    _collect_dead()
    return left


def _signal_until_gone(number: int, seconds: float) -> list[int]:
    signalled: set[psutil.Process] = set()
    deadline = time.monotonic() + seconds
    while True:
        _reap()
        left = [process for process in psutil.Process().children(recursive=True) if _alive(process)]
        if not left or time.monotonic() > deadline:
            return [process.pid for process in left]
        # Processes that are born meanwhile are found in the next round.
        for process in set(left) - signalled:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        signalled.update(left)
        time.sleep(_LOOK_EVERY_S)


def _collect_dead() -> None:
    """Leave no zombie to whoever adopts it: the first process of a container often collects none."""
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while time.monotonic() < deadline:
        _reap()
        if not psutil.Process().children():
            return
        time.sleep(_LOOK_EVERY_S)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _reap() -> dict[int, int]:
    """Collect children that have ended, adopted ones too: `{pid: exit code}`."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _watch(child: int, lifeline: int, wake: int) -> int:
    """Return the child's exit code, or 0 when the lifeline closed first."""
    while True:
        ready, _, _ = select.select([lifeline, wake], [], [])
        if wake in ready and signal.SIGTERM in os.read(wake, 4096):
            return 0
        ended = _reap()
        if child in ended:
            return ended[child]
        if lifeline in ready and not os.read(lifeline, 4096):
            return 0


def _wake(*_: object) -> None:
    """The handler of a signal that only has to end a wait."""


def main(arguments: list[str]) -> int:
    adopt_orphans()
    wake, noise = os.pipe()
    os.set_blocking(noise, False)
    signal.set_wakeup_fd(noise)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _wake)
    inherited = [int(fd) for fd in os.environ["ROLLOUTBUS_GYM_FDS"].split(",") if fd]
    child = subprocess.Popen(arguments[1:], stdin=subprocess.DEVNULL, pass_fds=inherited)
    # The host's end of the connection is the host's alone, or the worker would not see it close.
    for fd in inherited:
        os.close(fd)
    code = _watch(child.pid, sys.stdin.fileno(), wake)
    left = end_descendants(float(arguments[0]))
    if left:
        print(f"rolloutbus: processes {left} of a NeMo Gym stack cannot be ended", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

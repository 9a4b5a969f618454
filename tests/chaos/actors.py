"""The child processes of a schedule as the driver sees them, and the events that they send.

Faults wait for events, not for the clock: a group logged, a group held, a process gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.child import now_ms
from tests.chaos.spans import Span

ROOT = Path(__file__).parents[2]


class Progress:
    """All events of a schedule. `until` returns when its condition holds; it is looked at after each event."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}
        self.finished = False
        self.errors: list[str] = []
        self.batches: list[str] = []
        self.last_news = time.monotonic()
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        """Nothing more comes: the trainer is through, or cannot go on."""
        return self.finished or bool(self.errors)

    def note(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind in ("group", "failure"):
            self.logged.setdefault(line["id"], time.monotonic())
        elif kind == "finished":
            self.finished = True
        elif kind == "error":
            self.errors.append(line["error"])
        elif kind == "batch":
            self.batches.append(line["batch"])
        self.last_news = time.monotonic()
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._news.wait()


class Actor:
    """One child process. `held` are the groups that a worker has read and not ended. For the verdict it keeps what the
    process told of them, when it was there, and when it was kept from working, or even from being heard.
    """

    def __init__(self, module: str, name: str, progress: Progress, folder: Path) -> None:
        self.name = name
        self.held: set[str] = set()
        self.up = self.down = self.gone = False
        self.code: int | None = None
        self.lines: list[dict[str, Any]] = []
        self.up_at = self.gone_at = math.inf
        self.unable: list[Span] = []
        self.unheard: list[Span] = []
        self.process: psutil.Process | None = None
        self.log_path = folder / f"{name.replace('/', '-')}-{time.monotonic_ns()}.log"
        self._module = module
        self._progress = progress
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self, words: dict[str, Any]) -> None:
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"tests.chaos.{self._module}", cwd=ROOT, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=log, limit=1 << 24,
            )  # fmt: skip
        assert self._process.stdin is not None
        self.process = psutil.Process(self._process.pid)
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        await self._process.stdin.drain()
        self._listening = asyncio.create_task(self._listen(self._process))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            with contextlib.suppress(ValueError):  # a line that a SIGKILL cut short
                self._take(json.loads(line))
        self.code = await process.wait()
        self.gone, self.gone_at = True, now_ms()
        self._progress.note({"kind": "gone", "name": self.name})

    def _take(self, line: dict[str, Any]) -> None:
        if line["kind"] == "held":
            self.held.add(line["group"])
        elif line["kind"] == "ended":
            self.held.discard(line["group"])
        elif line["kind"] == "up":
            self.up, self.up_at = True, line["at"]
        elif line["kind"] == "down":
            self.down = True
        if line["kind"] in ("claimed", "held", "ended"):
            self.lines.append(line)
        self._progress.note(line)

    @contextlib.contextmanager
    def hindered(self, *, heard: bool = True) -> Generator[None]:
        """While the driver keeps it from taking groups, and where it is not `heard` from renewing them too."""
        began = now_ms()
        try:
            yield
        finally:
            self.unable.append((began, now_ms()))
            if not heard:
                self.unheard.append(self.unable[-1])

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self, number: int, patience_s: float) -> bool:
        """Signal and wait; kills what does not end, and says so with False."""
        self.signal(number)
        return await self.wait(patience_s)

    async def wait(self, patience_s: float) -> bool:
        assert self._listening is not None
        done, _ = await asyncio.wait({self._listening}, timeout=patience_s)
        if not done:
            self.signal(signal.SIGKILL)
            await self._listening
        return bool(done)

    def last_words(self, lines: int = 25) -> str:
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {self.name}: {line}" for line in text[-lines:])

"""A stack to watch: an environment that writes down what happens to it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class ProbeEnvironment:
    """Entries are `hosts`; a rollout takes `row_s`. What it does stands in `folder`/journal, and a file `sick` there
    makes it sick.
    """

    def __init__(self) -> None:
        self._config: Mapping[str, Any] = {}
        self._sockets: list[socket.socket] = []

    async def start(self, config: Mapping[str, Any]) -> None:
        class ForeignError(Exception):
            """Of a class that cannot be imported anywhere else."""

        self._config = config
        self._note("starting")
        await asyncio.sleep(config.get("start_s", 0.0))
        # It is other processes that write there.
        while len(events(self._folder, "started")) < config.get("after", 0):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if config.get("fail"):
            raise ForeignError(str(config["fail"]))
        for port in range(config["port_range_low"], config["port_range_high"]) if config.get("bind") else ():
            server = socket.socket()
            self._sockets.append(server)
            server.bind(("127.0.0.1", port))
        self._note("started", str(config.get("nemo_gym_log_dir", "-")))

    def list_entries(self) -> dict[str, list[str]]:
        return {name: ["responses_api_agents"] for name in self._config["hosts"]}

    async def run_rollouts(
        self, rows: Sequence[dict[str, Any]]
    ) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
        for row in rows:
            await asyncio.sleep(self._config.get("row_s", 0.0))
            model = [self._config.get("policy_base_url"), self._config.get("policy_model_name")]
            yield row, {"reward": 1.0, "row": row["_rowidx"], "pid": os.getpid(), "model": model}
        self._note("ran", rows[0]["_group_id"])

    async def health(self) -> None:
        if (self._folder / "sick").exists():
            raise ConnectionError("the verifier does not answer")

    async def stop(self) -> None:
        self._note("stopping")
        if self._config.get("hang_in_stop"):
            await asyncio.sleep(1e6)
        for server in self._sockets:
            server.close()

    @property
    def _folder(self) -> Path:
        return Path(self._config["folder"])

    def _note(self, event: str, detail: str = "-") -> None:
        if "folder" in self._config:
            with (self._folder / "journal").open("a") as journal:
                journal.write(f"{time.time()} {event} {os.getpid()} {detail}\n")


class ShyEnvironment(ProbeEnvironment):
    """Its constructor fails."""

    def __init__(self) -> None:
        raise RuntimeError("no licence for this machine")


def events(folder: Path, event: str) -> list[tuple[float, int, str]]:
    """(when, process, detail) of each event of that name, in order."""
    journal = folder / "journal"
    lines = [line.split(" ", 3) for line in journal.read_text().splitlines()] if journal.exists() else []
    return [(float(when), int(pid), detail) for when, name, pid, detail in lines if name == event]

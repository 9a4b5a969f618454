"""The chaos driver's worker process: the product's worker loop with short rollouts and points at which it kills itself.

The points are in this subclass and its environment; the product knows nothing of them. `kill_at` is `[point, count]`:
the process ends by SIGKILL when it comes to the point for the count-th time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.messages import GroupEntry, parse_group
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.broker.worker_transitions import Acceptance, Accepted, WorkerTransitions
from rolloutbus.shard_workers import ShardWorker, WorkerSettings

from tests.chaos.child import die, orders, tell


class KillPoint:
    """Counts the times that the process came by, and ends it at the one that was ordered."""

    def __init__(self, order: Sequence[Any] | None) -> None:
        self.point, self._left = (str(order[0]), int(order[1])) if order else ("", 0)

    def passes(self, point: str) -> bool:
        """Whether to die here."""
        if point != self.point:
            return False
        self._left -= 1
        return self._left == 0

    def reach(self, point: str) -> None:
        if self.passes(point):
            tell("dies", point=point)
            die()


class ChaosEnvironment:
    """Short rollouts. Each result says whose it is: row, key, instance, attempt, and a word only this call knows."""

    def __init__(self, label: str, point: KillPoint, *, scored: bool) -> None:
        self._label = label
        self._point = point
        self._scored = scored

    async def start(self, config: Mapping[str, Any]) -> None:
        """Nothing to build."""

    def list_entries(self) -> dict[str, list[str]]:
        return {}

    async def run_rollouts(
        self, rows: Sequence[dict[str, Any]]
    ) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
        self._point.reach("start")
        call, attempt = secrets.token_hex(4), int(rows[0]["_group_id"].rsplit(":", 1)[1])
        trouble = rows[0]["trouble"]
        if trouble == "kill":
            die()
        if trouble == "always" or (trouble == "once" and attempt == 1):
            raise ValueError(f"planned trouble of {rows[0]['_group_id']}")
        tasks = [asyncio.ensure_future(self._roll(row, call, attempt)) for row in rows]
        try:
            if self._scored:
                await asyncio.gather(*tasks)
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
        self._point.reach("environment")

    async def _roll(self, row: dict[str, Any], call: str, attempt: int) -> tuple[dict[str, Any], dict[str, Any]]:
        await asyncio.sleep(row["ms"] / 1000)
        identity = {"row": row["_rowidx"], "key": row["key"], "label": self._label, "attempt": attempt, "call": call}
        return row, {**identity, "filler": "y" * row["filler"]}

    async def health(self) -> None:
        """Always well."""

    async def stop(self) -> None:
        """Nothing to end."""


class ChaosWorker(ShardWorker):
    """Tells the driver which groups it has, and dies where it was told to."""

    point = KillPoint(None)

    async def _attempt(self, group: GroupEntry, stopped: asyncio.Future[str]) -> str:
        name = f"{group.batch}:{group.group}"
        tell("held", group=name)
        self.point.reach("read")
        outcome = await super()._attempt(group, stopped)
        tell("ended", group=name, outcome=outcome)
        return outcome


def watch_accepts(transitions: WorkerTransitions, point: KillPoint) -> None:
    """Put the two points around acceptance in: bytes written but no answer seen, and everything answered."""
    accept = transitions.accept

    async def watched(acceptances: Sequence[Acceptance]) -> list[Accepted | RolloutBusError]:
        answer = asyncio.ensure_future(accept(acceptances))
        if point.passes("written"):
            # A few turns of the loop and the bytes are with the kernel; the answer may or may not be on its way.
            for _ in range(4):
                await asyncio.sleep(0)
            tell("dies", point="written")
            die()
        answers = await answer
        if any(acceptance.finish for acceptance in acceptances):
            point.reach("acknowledged")
        return answers

    transitions.accept = watched  # pyright: ignore[reportAttributeAccessIssue]


def watch_claims(transitions: WorkerTransitions) -> None:
    """Tell which groups did not come from the queue, before anything else is done with them."""
    fetch = transitions.fetch

    async def watched(entries: Sequence[str]) -> list[Any]:
        found = await fetch(entries)
        for group in itertools.starmap(parse_group, found):
            tell("claimed", group=f"{group.batch}:{group.group}")
        return found

    transitions.fetch = watched  # pyright: ignore[reportAttributeAccessIssue]


async def main(words: dict[str, Any]) -> None:
    settings = BrokerSettings(url=words["url"], **words["settings"])
    point = KillPoint(words["kill_at"])
    environment = ChaosEnvironment(words["label"], point, scored=words["worker"]["commit"] == "group")
    worker = ChaosWorker(
        settings, words["run"], words["shard"], words["label"], environment, WorkerSettings(**words["worker"])
    )
    worker.point = point
    watch_accepts(worker._transitions, point)  # pyright: ignore[reportPrivateUsage]
    watch_claims(worker._transitions)  # pyright: ignore[reportPrivateUsage]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain, words["drain_s"])
    tell("up")
    await worker.run()
    tell("down", replaced=worker.replaced, ended=worker.statistics().ended)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(main(orders()))

"""The chaos driver's trainer process: runs batches, logs what it was handed before it asks for more, and resumes.

Each client runs its batches one after another, several clients side by side. `kill_at` is `[received | logged, count]`:
the process ends by SIGKILL when that many groups, or rows where rows were asked for, have come to the point.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from rolloutbus.broker.channel import Link
from rolloutbus.broker.client_transitions import cancel_batch
from rolloutbus.broker.errors import BrokerTimeoutError, BrokerUnavailableError, RolloutBusError, UnknownBatchError
from rolloutbus.broker.keys import Keys
from rolloutbus.broker.settings import BrokerSettings
from rolloutbus.collector import CompletedGroup, GroupFailure
from rolloutbus.trainer import RolloutClient
from rolloutbus.trainer.batch import GroupBatch, RowBatch

from tests.chaos.child import die, orders, tell
from tests.chaos.journal import Journal, read_journal

RESTARTS = 20


class Trainer:
    """Runs the batches of `words` that its journal does not have as closed."""

    def __init__(self, words: dict[str, Any]) -> None:
        self._words = words
        path = Path(words["journal"])
        self._before = read_journal(path)
        self._journal = Journal(path)
        self._received = self._logged = 0
        self._kill_at = tuple(words["kill_at"] or ("", 0))

    def _note(self, kind: str, **words: Any) -> None:
        self._journal.write(kind, **words)
        self._tell(kind, **words)

    def _tell(self, kind: str, **words: Any) -> None:
        tell(kind, **words)

    async def run(self) -> None:
        names = list(dict.fromkeys(batch["client"] for batch in self._words["batches"]))
        clients: dict[str, RolloutClient] = {}
        try:
            for name in names:
                clients[name] = await self._connected(name)
            self._tell("up")
            await asyncio.gather(*(self._run_all(name, client) for name, client in clients.items()))
        finally:
            await asyncio.gather(*(client.close() for client in clients.values()))
        self._note("finished")

    async def _run_all(self, name: str, client: RolloutClient) -> None:
        closed = {line["number"] for line in self._before if line["kind"] == "closed"}
        for number, batch in enumerate(self._words["batches"]):
            if batch["client"] == name and number not in closed:
                await self._run_one(client, number, batch)

    async def _connected(self, name: str) -> RolloutClient:
        """A client; what cannot connect ends at once by design, and is started again as a job's scheduler would."""
        words = self._words
        options: dict[str, Any] = {"client": name, "name_wait_s": 10, "fleet_wait_s": 20}
        for _ in range(RESTARTS):
            client = RolloutClient.connect(words["url"], run=words["run"], settings=words["settings"], **options)
            try:
                return await client.__aenter__()
            except (BrokerUnavailableError, BrokerTimeoutError) as error:
                logging.warning("the trainer could not connect (%s)", error)
                await client.close()
                await asyncio.sleep(0.5)
        raise BrokerUnavailableError(f"the trainer could not connect in {RESTARTS} tries")

    async def _run_one(self, client: RolloutClient, number: int, asked: dict[str, Any]) -> None:
        known = [line["batch"] for line in self._before if line["kind"] == "batch" and line["number"] == number]
        batch: GroupBatch | RowBatch | None = None
        if known:
            batch = await self._resumed(client, number, known[-1], asked)
        if batch is None:
            run = client.run_rollouts if asked["by_row"] else client.run_groups
            batch = run(asked["rows"], asked["size"], on_failure="yield")
            self._note("batch", number=number, batch=batch.id)
        rows = Rows(batch.id, asked["size"])
        async with batch:
            async for item in batch:
                await self._take(number, rows, item)
        counts = batch.counts
        self._note("closed", number=number, batch=batch.id, counts=counts._asdict(), metrics=batch.metrics)

    async def _resumed(
        self, client: RolloutClient, number: int, batch: str, asked: dict[str, Any]
    ) -> GroupBatch | None:
        try:
            found = await client.resume(batch, asked["rows"], on_failure="yield")
        except UnknownBatchError as error:
            # Its publishing had not finished, or it was closed already: as the message says, cancel it and go on.
            self._note("unknown", number=number, batch=batch, error=str(error))
            await self._cancel(asked["client"], batch)
            return None
        self._note("resumed", number=number, batch=batch)
        return found

    async def _cancel(self, client: str, batch: str) -> None:
        words = self._words
        link = Link(BrokerSettings(url=words["url"], **words["settings"]), "chaos-cancel")
        try:
            await cancel_batch(
                link, Keys(words["run"]), batch, client, words["shards"], "its publishing never finished"
            )
        except UnknownBatchError:
            pass
        finally:
            await link.close()

    async def _take(self, number: int, rows: Rows, item: CompletedGroup | GroupFailure | tuple[int, Any]) -> None:
        self._received += 1
        if self._kill_at == ("received", self._received):
            die()
        if isinstance(item, GroupFailure):
            why = f"{item.type}: {item.message}"[:200]
            self._note("failure", number=number, id=item.group_id, index=item.group_index, why=why)
        elif isinstance(item, CompletedGroup):
            results = [_without_filler(result) for result in item.results]
            self._group(number, item.group_id, item.group_index, results, item.origins)
        else:
            index, result = item[0], _without_filler(item[1])
            self._note("row", number=number, batch=rows.batch, row=index, result=result)
            if whole := rows.add(index, result):
                group = index // rows.size
                self._group(number, f"{rows.batch}:{group}", group, whole, None)
        self._logged += 1
        if self._kill_at == ("logged", self._logged):
            die()
        if self._words["delay_s"]:
            await asyncio.sleep(self._words["delay_s"])

    def _group(self, number: int, group_id: str, index: int, results: list[Any], origins: Any) -> None:
        self._note("group", number=number, id=group_id, index=index, results=results, origins=origins)


class Rows:
    """Rows of one batch on their way to whole groups."""

    def __init__(self, batch: str, size: int) -> None:
        self.batch = batch
        self.size = size
        self._groups: dict[int, dict[int, Any]] = {}

    def add(self, index: int, result: Any) -> list[Any] | None:
        """The group's results in order, when this was the last one."""
        group = self._groups.setdefault(index // self.size, {})
        group[index] = result
        return [group[at] for at in sorted(group)] if len(group) == self.size else None


def _without_filler(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "filler"}


async def main(words: dict[str, Any]) -> None:
    trainer = Trainer(words)
    try:
        await trainer.run()
    except RolloutBusError as error:
        tell("error", error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(main(orders()))

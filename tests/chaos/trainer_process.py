"""The chaos driver's trainer process: runs batches, logs what it was handed before it asks for more, and resumes.

`kill_at` is `[received | logged, count]`: the process ends by SIGKILL when that many groups have come to the point.
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
from rolloutbus.trainer.batch import GroupBatch

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
        tell(kind, **words)

    async def run(self) -> None:
        client = await self._connected()
        try:
            tell("up")
            for number, batch in enumerate(self._words["batches"]):
                if not any(line["kind"] == "closed" and line["number"] == number for line in self._before):
                    await self._run_one(client, number, batch["rows"], batch["size"])
        finally:
            await client.close()
        self._note("finished")

    async def _connected(self) -> RolloutClient:
        """A client; what cannot connect ends at once by design, and is started again as a job's scheduler would."""
        words = self._words
        options: dict[str, Any] = {"name_wait_s": 10, "fleet_wait_s": 20}
        for _ in range(RESTARTS):
            client = RolloutClient.connect(words["url"], run=words["run"], settings=words["settings"], **options)
            try:
                return await client.__aenter__()
            except (BrokerUnavailableError, BrokerTimeoutError) as error:
                logging.warning("the trainer could not connect (%s)", error)
                await client.close()
                await asyncio.sleep(0.5)
        raise BrokerUnavailableError(f"the trainer could not connect in {RESTARTS} tries")

    async def _run_one(self, client: RolloutClient, number: int, rows: list[dict[str, Any]], size: int) -> None:
        known = [line["batch"] for line in self._before if line["kind"] == "batch" and line["number"] == number]
        batch = await self._resumed(client, number, known[-1], rows) if known else None
        if batch is None:
            batch = client.run_groups(rows, size, on_failure="yield")
            self._note("batch", number=number, batch=batch.id)
        async with batch:
            async for group in batch:
                await self._take(number, group)
        counts = batch.counts
        self._note("closed", number=number, batch=batch.id, counts=counts._asdict(), metrics=batch.metrics)

    async def _resumed(
        self, client: RolloutClient, number: int, batch: str, rows: list[dict[str, Any]]
    ) -> GroupBatch | None:
        try:
            found = await client.resume(batch, rows, on_failure="yield")
        except UnknownBatchError as error:
            # Its publishing had not finished, or it was closed already: as the message says, cancel it and go on.
            self._note("unknown", number=number, batch=batch, error=str(error))
            await self._cancel(batch)
            return None
        self._note("resumed", number=number, batch=batch)
        return found

    async def _cancel(self, batch: str) -> None:
        words = self._words
        link = Link(BrokerSettings(url=words["url"], **words["settings"]), "chaos-cancel")
        try:
            await cancel_batch(
                link, Keys(words["run"]), batch, "trainer", words["shards"], "its publishing never finished"
            )
        except UnknownBatchError:
            pass
        finally:
            await link.close()

    async def _take(self, number: int, group: CompletedGroup | GroupFailure) -> None:
        self._received += 1
        if self._kill_at == ("received", self._received):
            die()
        if isinstance(group, CompletedGroup):
            results = [{name: value for name, value in result.items() if name != "filler"} for result in group.results]
            self._note(
                "group",
                number=number,
                id=group.group_id,
                index=group.group_index,
                results=results,
                origins=group.origins,
            )
        else:
            self._note(
                "failure",
                number=number,
                id=group.group_id,
                index=group.group_index,
                why=f"{group.type}: {group.message}"[:200],
            )
        self._logged += 1
        if self._kill_at == ("logged", self._logged):
            die()
        if self._words["delay_s"]:
            await asyncio.sleep(self._words["delay_s"])


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

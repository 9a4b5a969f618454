"""A trainer as a process, for tests that kill it: it publishes a batch, says its id, and then each group that it was handed.

It stops asking after `take` groups, but for the one more that acknowledges the last of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from rolloutbus.trainer import RolloutClient

from tests.stacks import rows_of


async def main(order: dict[str, Any]) -> None:
    async with RolloutClient.connect(order["url"], run=order["run"], settings=order["settings"]) as client:
        async with client.run_groups(rows_of(order["groups"]), 2, on_failure="yield") as batch:
            print(json.dumps({"batch": batch.id}), flush=True)
            taken = 0
            async for group in batch:
                print(json.dumps({"group": group.group_index}), flush=True)
                taken += 1
                if taken == order["take"]:
                    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

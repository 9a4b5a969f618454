"""A trainer as a process, for tests that kill it: it publishes a batch, says its id, and then each group that it was
handed.

It stops asking after `take` groups, so that all but the last are acknowledged, and it ends with the process that
started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any

from rolloutbus.trainer import RolloutClient

from tests.stacks import rows_of


def end_with_parent() -> None:
    """A test that is killed closes our standard input."""
    sys.stdin.read()
    os._exit(1)


async def main(order: dict[str, Any]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    async with (
        RolloutClient.connect(order["url"], run=order["run"], settings=order["settings"]) as client,
        client.run_groups(rows_of(order["groups"]), 2, on_failure="yield") as batch,
    ):
        print(json.dumps({"batch": batch.id}), flush=True)
        taken = 0
        async for group in batch:
            print(json.dumps({"group": group.group_index}), flush=True)
            taken += 1
            if taken == order["take"]:
                await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

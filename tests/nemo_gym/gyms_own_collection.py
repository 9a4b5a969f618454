"""NeMo Gym's collection by itself, against servers that run: `gyms_own_collection.py HEAD_PORT`, rows as JSON on
standard input.

The last line it prints is `{row index: reward}`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any


async def collect(rows: list[dict[str, Any]], port: int) -> dict[int, float]:
    servers: Any = importlib.import_module("nemo_gym.server_utils")
    helper: Any = importlib.import_module("nemo_gym.rollout_collection").RolloutCollectionHelper()
    head = servers.BaseServerConfig(host="127.0.0.1", port=port)
    rewards: dict[int, float] = {}
    for answer in helper.run_examples(examples=rows, head_server_config=head):
        row, result = await answer
        rewards[row["_rowidx"]] = result["reward"]
    await servers._GLOBAL_AIOHTTP_CLIENT.close()
    servers._GLOBAL_AIOHTTP_CLIENT = None
    return rewards


if __name__ == "__main__":
    print("\n" + json.dumps(asyncio.run(collect(json.load(sys.stdin), int(sys.argv[1])))), flush=True)

"""A worker of the bare peer: reads groups with redis-py, acknowledges, answers row by row in one pipeline.

No lease, no fence, no retry.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from benchmarks.payloads import make_result

# Neither is fully typed.
msgpack: Any = importlib.import_module("msgpack")
redis: Any = importlib.import_module("redis")


def pack_array(value: np.ndarray[Any, Any]) -> Any:
    return msgpack.ExtType(1, value.dtype.str.encode() + b"|" + value.tobytes())


def main(url: str, shard: str) -> None:
    connection = redis.Redis.from_url(url)
    while True:
        reply = connection.xreadgroup("g", "w", {f"groups:{shard}": ">"}, count=1, block=500)
        if connection.get("stop"):
            return
        found: list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]] = reply or []
        for _, entries in found:
            for entry, fields in entries:
                pipe = connection.pipeline(transaction=False)
                for row in msgpack.unpackb(fields[b"payload"]):
                    body = msgpack.packb(make_result(row), default=pack_array)
                    pipe.xadd(f"results:{shard}", {"row": row["_rowidx"], "payload": body})
                pipe.xack(f"groups:{shard}", "g", entry)
                pipe.execute()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

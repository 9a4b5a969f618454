"""A worker of the bare peer: reads groups with redis-py, acknowledges, answers row by row in one pipeline. No lease, no fence, no retry."""

from __future__ import annotations

import sys

import msgpack
import numpy as np
import redis

from benchmarks.payloads import make_result


def pack_array(value: object) -> msgpack.ExtType:
    assert isinstance(value, np.ndarray)
    return msgpack.ExtType(1, value.dtype.str.encode() + b"|" + value.tobytes())


def main(url: str, shard: str) -> None:
    connection = redis.Redis.from_url(url)
    while True:
        reply = connection.xreadgroup("g", "w", {f"groups:{shard}": ">"}, count=1, block=500)
        if connection.get("stop"):
            return
        for _, entries in reply or []:  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
            for entry, fields in entries:
                pipe = connection.pipeline(transaction=False)
                for row in msgpack.unpackb(fields[b"payload"]):
                    body = msgpack.packb(make_result(row), default=pack_array)
                    pipe.xadd(f"results:{shard}", {"row": row["_rowidx"], "payload": body})
                pipe.xack(f"groups:{shard}", "g", entry)
                pipe.execute()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

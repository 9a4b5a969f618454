"""A worker of the thin peer: reads a few groups, answers each with one entry in a transaction that acknowledges it, and
reads on in the same write. No lease, no fence, no retry.
"""

from __future__ import annotations

import sys

from rolloutbus.broker import codec
from rolloutbus.broker.channel import Payload
from rolloutbus.broker.messages import frame

from benchmarks.payloads import make_result
from benchmarks.thin_connection import Command, Connection, Found

READ_AT_ONCE = 4


def answer(route: str, entry: bytes, payload: bytes) -> list[Command]:
    results = [Payload.of(codec.encode(make_result(row))) for row in codec.decode_rows(payload)]
    return [
        ("MULTI",),
        ("XADD", f"results:{route}", "*", "payload", frame(results)),
        ("XACK", f"groups:{route}", "workers", entry),
        ("XDEL", f"groups:{route}", entry),
        ("EXEC",),
    ]


def main(url: str, route: str) -> None:
    connection = Connection(url)
    block = ("COUNT", READ_AT_ONCE, "BLOCK", 500, "STREAMS", f"groups:{route}", ">")
    read: Command = ("XREADGROUP", "GROUP", "workers", "w", *block)
    answers: list[Command] = []
    while True:
        found: Found = connection.ask([*answers, read])[-1] or []
        answers = [
            command for _, entries in found for entry, fields in entries for command in answer(route, entry, fields[1])
        ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

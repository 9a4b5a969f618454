"""rolloutbus beside its peers: the same rows, in turns, in one session; ratios count, not rates."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace

from benchmarks.contest import Contestant, Order
from benchmarks.payloads import COMPARED, KINDS
from benchmarks.results import Compared

PEERS: dict[str, tuple[str, ...]] = {
    "ray": ("ray_streams",),
    "bare": ("bare_redis",),
    "thin": ("thin_redis",),
    "unix": ("product", "unix"),
    "tcp": ("product", "tcp"),
    "aof": ("product", "aof"),
}
# `thin` tells how far away the machine's limit is, which is asked for by name.
BY_DEFAULT = tuple(name for name in PEERS if name != "thin")
# The rest gives single rows anyway.
WITH_ROW_API = ("unix", "tcp", "aof")
# What durability or a missing guarantee does at low load is no question that anybody asked.
AT_LOW_LOAD = ("ray", "unix", "tcp")
LOW_LOAD = Order("1.5 KB", 400, shards=1, rate=200.0)
LOW_LOAD_ROUNDS = 3
# Times Ray's rate, by peer.
GOALS: dict[str, dict[str, float]] = {
    "1.5 KB": {"unix": 12.0},
    "64 KB numpy": {"unix": 6.0},
    "token lists": {"unix": 2.2},
    "1 MB numpy": {"unix": 1.6, "tcp": 1.2},
}
SMALLEST_ORDER = 64

Players = dict[str, Contestant]


@contextlib.contextmanager
def playing(names: Sequence[str]) -> Generator[Players, None, None]:
    """Contestants that are up, by name."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Contestant(name, *PEERS[name])) for name in names}


def order_of(kind: str, scale: float) -> Order:
    """`scale` of the full number of rows, in whole groups for two shards."""
    return Order(kind, max(SMALLEST_ORDER, int(KINDS[kind][1] * scale)) // 32 * 32)


def compare(players: Players, order: Order, repeats: int) -> Compared:
    """Repeats of one payload, players in turns, after one round of warm-up."""
    found = Compared(rows=order.rows)
    for repeat in range(repeats + 1):
        for name, player in players.items():
            batch = player.run(order)
            by_row = player.run(replace(order, by_row=True)) if name in WITH_ROW_API else None
            if repeat:
                found.batches.setdefault(name, []).append(batch)
            if repeat and by_row:
                found.by_row.setdefault(name, []).append(by_row)
    return found


def low_load(players: Players) -> dict[str, list[float]]:
    """Milliseconds from a row's end to its hand-over at 200 rows/s, by player; all rounds together, in turns."""
    found: dict[str, list[float]] = {name: [] for name in players if name in AT_LOW_LOAD}
    for _ in range(LOW_LOAD_ROUNDS):
        for name, overheads in found.items():
            overheads += players[name].run(LOW_LOAD).overhead_ms
    return found


def measure(
    names: Sequence[str], kinds: Sequence[str], repeats: int, scale: float
) -> tuple[dict[str, Compared], dict[str, list[float]]]:
    """Each payload; with the first of them also the overheads at low load, which are of its rows."""
    with playing(names) as players:
        compared = {kind: compare(players, order_of(kind, scale), repeats) for kind in kinds}
        return compared, low_load(players) if COMPARED[0] in kinds else {}

"""Entries that a stranger, or an older tool, put on the streams: set aside and counted, while the batch beside them
goes through.

Each is put in front of real work, so a worker or collector that fell over it would not finish the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.regressions.arena import Arena, Environment, arena_on, comes_true, completed, rows_of

Fields = dict[Any, Any]
PLAIN: Fields = {
    "kind": "group",
    "batch": "nobody",
    "group": 0,
    "client": "trainer",
    "route": "a",
    "rows": 1,
    "first_row": 0,
}
GROUP: Fields = {**PLAIN, "payload": b"\x93"}
RESULT: Fields = {"kind": "rows", "group": 0, "row_indices": "0", "attempt": 1, "instance": "s/0", "payload": b"x"}


def without(fields: Fields, name: str) -> Fields:
    return {key: value for key, value in fields.items() if key != name}


FOREIGN_GROUPS: dict[str, Fields] = {
    "nothing-of-ours": {"hello": "world"},
    "foreign-kind": {**GROUP, "kind": "job"},
    "no-payload": without(GROUP, "payload"),
    "no-batch": without(GROUP, "batch"),
    "rows-no-number": {**GROUP, "rows": "many"},
    "number-of-5000-digits": {**GROUP, "group": "9" * 5000},
    "not-utf-8": {**GROUP, "batch": b"\xff\xfe"},
    "ten-thousand-fields": {f"f{at}": at for at in range(10_000)},
    "a-field-of-a-megabyte": {"kind": "x" * 1_000_000},
}
# They look like groups, of a batch that is not there: nobody's work any more.
STALE_GROUPS: dict[str, Fields] = {
    "batch-that-is-over": GROUP,
    "batch-with-odd-name": {**GROUP, "batch": "a} b:{c *"},
    "rows-beyond-counting": {**GROUP, "rows": 10**15, "first_row": 10**18},
    "negative-numbers": {**GROUP, "rows": -4, "first_row": -1, "group": -1},
}
FOREIGN_RESULTS: dict[str, Fields] = {
    "nothing-of-ours": {"hello": "world"},
    "foreign-kind": {**RESULT, "kind": "job"},
    "no-payload": without(RESULT, "payload"),
    "group-of-nobody": {**RESULT, "group": 77},
    "group-negative": {**RESULT, "group": -1},
    "row-of-another-group": {**RESULT, "row_indices": "5"},
    "rows-beyond-counting": {**RESULT, "row_indices": f"0,{10**30}"},
    "failure-of-more-rows-than-memory": {**RESULT, "kind": "failed", "first_row": 0, "rows": 10**14},
    "failure-of-no-rows": {**RESULT, "kind": "failed", "first_row": 0, "rows": 0},
    "not-utf-8": {**RESULT, "instance": b"\xff"},
    "ten-thousand-fields": {f"f{at}": at for at in range(10_000)},
}


@pytest.fixture
async def arena(tmp_path: Path) -> AsyncIterator[Arena]:
    async with arena_on(tmp_path) as made:
        yield made


def letters(arena: Arena) -> list[dict[bytes, bytes]]:
    return [letter for _, letter in arena.control.xrange(arena.keys.dead)]


async def whole_batch(arena: Arena, when_open: Callable[[str], None] = lambda batch: None) -> None:
    """A batch goes through, with `when_open` done to the broker before any worker answers."""
    async with arena.client() as client, client.run_groups(rows_of(6, 2), 2) as batch, asyncio.timeout(20):
        await comes_true(lambda: arena.control.exists(arena.keys.batch(batch.id)))
        when_open(batch.id)
        arena.worker("s/0", Environment())
        groups = await completed(batch)
    assert sorted(result["row"] for group in groups for result in group.results) == list(range(12))


@pytest.mark.parametrize("name", FOREIGN_GROUPS)
async def test_a_strangers_entry_among_the_groups_is_set_aside_once(arena: Arena, name: str) -> None:
    arena.control.xgroup_create(arena.keys.groups("s"), "workers", id="0", mkstream=True)
    arena.control.xadd(arena.keys.groups("s"), FOREIGN_GROUPS[name])
    await whole_batch(arena)
    assert [letter[b"reason"] for letter in letters(arena)] == [b"foreign"]
    assert arena.control.xlen(arena.keys.groups("s")) == 0
    events = [event for _, event in arena.control.xrange(arena.keys.events) if event[b"kind"] == b"foreign"]
    assert len(events) == 1


@pytest.mark.parametrize("name", STALE_GROUPS)
async def test_a_group_of_a_batch_that_is_not_there_is_dropped(arena: Arena, name: str) -> None:
    arena.control.xgroup_create(arena.keys.groups("s"), "workers", id="0", mkstream=True)
    arena.control.xadd(arena.keys.groups("s"), STALE_GROUPS[name])
    await whole_batch(arena)
    assert arena.control.xlen(arena.keys.groups("s")) == 0
    assert not list(arena.control.scan_iter("*batch:*"))


@pytest.mark.parametrize("name", FOREIGN_RESULTS)
async def test_a_strangers_entry_among_the_results_is_set_aside_once(arena: Arena, name: str) -> None:
    def put(batch: str) -> None:
        fields = {**FOREIGN_RESULTS[name]}
        arena.control.xadd(
            arena.keys.results("trainer", "s"), {**fields, "batch": batch} if "kind" in fields else fields
        )

    await whole_batch(arena, put)
    assert [letter[b"reason"] for letter in letters(arena)] == [b"foreign"]


async def test_a_forged_group_of_a_batch_that_is_there_is_set_aside(arena: Arena) -> None:
    await whole_batch(
        arena, lambda batch: arena.control.xadd(arena.keys.groups("s"), {**GROUP, "batch": batch, "group": 99})
    )
    assert [letter[b"reason"] for letter in letters(arena)] == [b"foreign"]


async def test_a_payload_that_was_changed_on_the_broker_fails_its_group_alone(arena: Arena) -> None:
    def spoil(batch: str) -> None:
        stream = arena.keys.groups("s")
        entry, fields = arena.control.xrange(stream, count=1)[0]
        arena.control.xdel(stream, entry)
        arena.control.xadd(stream, {**fields, b"payload": fields[b"payload"][:-9]})

    async with arena.client() as client, client.run_groups(rows_of(4, 2), 2, on_failure="yield") as batch:
        await comes_true(lambda: arena.control.xlen(arena.keys.groups("s")) == 4)
        spoil(batch.id)
        arena.worker("s/0", Environment())
        async with asyncio.timeout(20):
            groups: list[Any] = [group async for group in batch]
    assert sorted(type(group).__name__ for group in groups) == ["CompletedGroup"] * 3 + ["GroupFailure"]

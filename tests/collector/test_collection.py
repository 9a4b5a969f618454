"""One batch on its way back: rows become groups once, whatever comes again, and what is foreign changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker import codec
from rolloutbus.broker.errors import BatchCancelledError, BatchError, UnreadableResultError
from rolloutbus.broker.messages import Failure, ForeignEntryError, ResultEntry
from rolloutbus.collector import BatchCollection, CompletedGroup, GroupFailure, Origin, PackedGroup, PackedRow, Sink

from tests.entries import rows_payload

SIZE = 2


class Desk:
    """A collection of `groups` groups of two rows on two shards, and everything that it handed on."""

    def __init__(self, groups: int = 2, *, rows_wanted: bool = True) -> None:
        self.groups: list[CompletedGroup | GroupFailure] = []
        self.errors: list[BaseException] = []
        self.rows: list[tuple[int, Any, int | None]] = []
        shards = ["even" if at % 2 == 0 else "odd" for at in range(groups)]
        sink = Sink(self._on_group, self.errors.append, self._on_row if rows_wanted else None)
        self.mine: Sequence[dict[str, Any]] = [{"n": at} for at in range(groups * SIZE)]
        self.collection = BatchCollection("b", self.mine, SIZE, shards, sink)

    def _on_group(self, outcome: PackedGroup | GroupFailure) -> None:
        self.groups.append(outcome.opened() if isinstance(outcome, PackedGroup) else outcome)

    def _on_row(self, row: PackedRow, group: int | None) -> None:
        self.rows.append((*row.opened(), group))


def rows_entry(
    entry: str, group: int, indices: Sequence[int], *, instance: str = "s/0", attempt: int = 1
) -> ResultEntry:
    payload = b"".join(bytes(part) for part in rows_payload([{"i": index} for index in indices]).buffers)
    return ResultEntry(entry, "rows", "b", group, tuple(indices), attempt, instance, "", payload)


def failed_entry(entry: str, group: int, payload: bytes | None = None) -> ResultEntry:
    failure = Failure("data", "ValueError", "bad", "trace", "s/1", 2, 418).packed() if payload is None else payload
    return ResultEntry(entry, "failed", "b", group, (group * SIZE, group * SIZE + 1), 2, "s/1", "", failure)


def test_a_group_is_handed_on_when_its_last_row_came_with_the_callers_rows_and_origins() -> None:
    desk = Desk()
    desk.collection.add(rows_entry("1-0", 1, [3], instance="s/1", attempt=2))
    assert desk.groups == []
    desk.collection.add(rows_entry("1-1", 1, [2]))
    (group,) = desk.groups
    assert isinstance(group, CompletedGroup)
    assert (group.group_id, group.group_index, group.results) == ("b:1", 1, [{"i": 2}, {"i": 3}])
    assert group.rows[0] is desk.mine[2]
    assert group.origins == [Origin("s/0", 1), Origin("s/1", 2)]
    assert desk.rows == [(3, {"i": 3}, None), (2, {"i": 2}, 1)]


@given(st.permutations([0, 1, 2, 3, 4, 5]), st.lists(st.integers(0, 5)))
def test_a_row_counts_once_whatever_comes_again(order: list[int], again: list[int]) -> None:
    desk = Desk(3)
    for number, index in enumerate([*order[:3], *again, *order]):
        desk.collection.add(rows_entry(f"{number}-0", index // SIZE, [index]))
    assert sorted(group.group_index for group in desk.groups) == [0, 1, 2]
    assert [row[0] for row in desk.rows] == list(dict.fromkeys([*order[:3], *again, *order]))
    assert desk.collection.duplicate_rows == 3 + len(again)
    assert desk.collection.all_ended


def test_a_broker_that_lost_its_last_second_mixes_no_attempts() -> None:
    """Found by chaos: the file was cut after one of a group's two entries had been read. The group ran again, and the
    row that the trainer had of the first attempt was joined with its sibling of the second, on a shard that commits
    whole groups.
    """
    desk = Desk(rows_wanted=False)
    desk.collection.add(rows_entry("1-0", 0, [0], instance="s/1"))
    desk.collection.add(rows_entry("1-1", 1, [2, 3], instance="s/1"))
    desk.collection.start_over()
    desk.collection.add(rows_entry("2-0", 0, [0], attempt=2))
    desk.collection.add(rows_entry("1-1", 1, [2, 3], instance="s/1"))
    desk.collection.add(rows_entry("2-1", 0, [1], attempt=2))
    whole, again = desk.groups
    assert isinstance(whole, CompletedGroup)
    assert isinstance(again, CompletedGroup)
    assert (whole.group_index, again.group_index) == (1, 0)
    assert again.origins == [Origin("s/0", 2), Origin("s/0", 2)]


def test_rows_that_the_caller_has_are_not_given_again_after_a_restart() -> None:
    desk = Desk()
    desk.collection.add(rows_entry("1-0", 0, [0]))
    desk.collection.start_over()
    desk.collection.add(rows_entry("2-0", 0, [0, 1], attempt=2))
    assert [row[0] for row in desk.rows] == [0, 1]


def test_the_same_entry_read_again_is_no_duplicate() -> None:
    desk = Desk()
    for _ in range(2):
        assert desk.collection.add(rows_entry("1-0", 0, [0])) == []
    assert desk.collection.duplicate_rows == 0


@pytest.mark.parametrize(
    ("group", "indices"),
    [(0, [2]), (0, [-1]), (1, [4]), (0, [0, 0]), (5, [10]), (-1, [0]), (0, [0, 1, 2])],
)
def test_an_entry_with_rows_that_are_not_its_groups_is_foreign(group: int, indices: list[int]) -> None:
    desk = Desk()
    with pytest.raises(ForeignEntryError):
        desk.collection.add(rows_entry("1-0", group, indices))
    assert desk.rows == []
    assert desk.collection.unfinished() == [0, 1]
    assert desk.collection.leftovers() == []


def test_an_entry_whose_results_do_not_match_its_rows_ends_the_batch_with_an_error() -> None:
    desk = Desk()
    entry = rows_entry("7-0", 0, [0])
    desk.collection.add(ResultEntry("7-0", "rows", "b", 0, (0, 1), 1, "s", "", entry.payload))
    (error,) = desk.errors
    assert isinstance(error, BatchError)
    assert "group 0 (entry 7-0)" in str(error)


def test_a_payload_that_is_not_framed_as_one_ends_the_batch_with_an_error() -> None:
    desk = Desk()
    desk.collection.add(ResultEntry("7-0", "rows", "b", 0, (0,), 1, "s", "", b"\xdd\xff"))
    assert "cannot be read" in str(desk.errors[0])


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"".join(codec.encode(None)), "the result of row 3 of batch b, from s, attempt 1, is None; let the"),
        (b"nonsense", "the result of row 3 of batch b, from s, attempt 1, cannot be read: payload"),
    ],
)
def test_a_result_that_is_none_or_cannot_be_read_is_an_error_of_whoever_unpacks_it(
    payload: bytes, complaint: str
) -> None:
    good = b"".join(codec.encode({"i": 2}))
    group = PackedGroup("b", 1, [{}, {}], [memoryview(good), memoryview(payload)], [Origin("s", 1)] * 2)
    with pytest.raises(UnreadableResultError) as raised:
        group.opened()
    assert str(raised.value).startswith(complaint)
    assert str(raised.value.of_row(70)).startswith("the result of row 70 of batch b, from s")


def test_a_failed_group_is_a_failure_with_all_that_is_known() -> None:
    desk = Desk()
    desk.collection.add(rows_entry("1-0", 1, [2]))
    desk.collection.add(failed_entry("1-1", 1))
    desk.collection.add(failed_entry("1-2", 1))
    (failure,) = desk.groups
    assert isinstance(failure, GroupFailure)
    assert (failure.group_index, list(failure.row_indices), failure.failure_class) == (1, [2, 3], "data")
    assert (failure.type, failure.message, failure.traceback) == ("ValueError", "bad", "trace")
    assert (failure.instance, failure.attempt, failure.http_status) == ("s/1", 2, 418)
    assert "rows 2 to 3" in str(failure.error())
    assert desk.collection.failed == 1
    desk.collection.add(rows_entry("1-3", 1, [3]))
    assert len(desk.groups) == 1


def test_a_failure_that_cannot_be_read_is_still_a_failure() -> None:
    desk = Desk()
    desk.collection.add(failed_entry("1-0", 0, b"\xc1"))
    assert isinstance(desk.groups[0], GroupFailure)


def test_an_operators_cancellation_is_told_with_its_reason() -> None:
    desk = Desk()
    desk.collection.add(ResultEntry("1-0", "cancelled", "b", -1, (), 0, "", "", b"too dear"))
    (error,) = desk.errors
    assert isinstance(error, BatchCancelledError)
    assert "too dear" in str(error)


def test_handing_over_names_the_entries_of_each_shard_and_their_bytes_once() -> None:
    desk = Desk()
    entries = [rows_entry("1-0", 0, [0, 1]), rows_entry("1-1", 1, [2]), rows_entry("1-2", 1, [3])]
    for entry in entries:
        desk.collection.add(entry)
    handovers = desk.collection.hand_over([0, 1])
    first, second, third = (len(entry.payload) for entry in entries)
    assert [(h.shard, h.groups, h.entries) for h in handovers] == [
        ("even", [0], {"1-0": first}), ("odd", [1], {"1-1": second, "1-2": third}),
    ]  # fmt: skip
    assert desk.collection.hand_over([0, 1]) == []


def test_an_entry_of_a_group_handed_over_may_go_at_once_and_frees_its_bytes() -> None:
    """A broker that lost its last second counts these bytes as unread again; unless they are freed, its workers wait
    for ever.
    """
    desk = Desk()
    desk.collection.add(rows_entry("1-0", 0, [0, 1]))
    desk.collection.hand_over([0])
    again = rows_entry("2-0", 0, [0, 1], attempt=2)
    (handover,) = desk.collection.add(again)
    assert (handover.entries, handover.groups) == ({"2-0": len(again.payload)}, [])


def test_what_nobody_will_have_is_named_when_the_batch_is_over() -> None:
    desk = Desk()
    desk.collection.add(rows_entry("1-0", 0, [0, 1]))
    desk.collection.add(rows_entry("1-1", 1, [2]))
    desk.collection.hand_over([0])
    assert [(h.shard, list(h.entries)) for h in desk.collection.leftovers()] == [("odd", ["1-1"])]
    assert desk.collection.leftovers() == []


def test_groups_of_a_former_process_are_not_waited_for() -> None:
    desk = Desk(3)
    desk.collection.skip(0, completed=True)
    desk.collection.skip(1, failed=True)
    assert desk.collection.unfinished() == [2]
    assert (desk.collection.completed, desk.collection.failed) == (1, 1)
    (handover,) = desk.collection.add(rows_entry("1-0", 0, [0, 1]))
    assert list(handover.entries) == ["1-0"]
    assert desk.groups == []


async def test_progress_is_remembered() -> None:
    desk = Desk()
    before = desk.collection.last_progress
    await asyncio.sleep(0.002)
    desk.collection.add(rows_entry("1-0", 0, [0]))
    assert desk.collection.last_progress > before

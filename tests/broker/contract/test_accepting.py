"""accept and finish: each row counts once, a group ends in one step with its last row, and only its holder writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rolloutbus.broker import worker_transitions
from rolloutbus.broker.channel import Channel, Link, Payload
from rolloutbus.broker.client_transitions import BatchSpec, OutgoingGroup
from rolloutbus.broker.errors import BrokerError, BrokerFullError, RolloutBusError
from rolloutbus.broker.messages import parse_result
from rolloutbus.broker.steps import Runner, Step, run_steps
from rolloutbus.broker.worker_transitions import Acceptance, Rows

from tests.broker.contract.stage import ALL, SHARD, SIZE, Batch, Stage, result_rows


async def test_accepted_rows_stand_on_the_clients_stream_in_readable_form(stage: Stage):
    await stage.sealed(2)
    worker = stage.worker("math/0")
    await stage.taken(worker)
    attempt = await stage.taken(worker)
    assert (await stage.accept(worker, attempt, result_rows(1), result_rows(3, 0))).status == "ok"
    found = await stage.results()
    assert [(entry.kind, entry.group, entry.row_indices, entry.attempt, entry.instance) for entry in found] == [
        ("rows", 1, (5,), 1, "math/0"),
        ("rows", 1, (7, 4), 1, "math/0"),
    ]


async def test_a_row_is_accepted_once(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    assert (await stage.accept(worker, attempt, result_rows(1))).status == "ok"
    again = await stage.accept(worker, attempt, result_rows(1))
    assert (again.status, again.seen) == ("duplicate", {1})
    assert len(await stage.results()) == 1
    assert (await stage.record(batch))["accepted"] == "1"
    assert await stage.count(batch, "duplicate_rows") == 1


async def test_with_one_duplicate_nothing_of_an_acceptance_counts_and_it_tells_which(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.accept(worker, attempt, result_rows(2))
    answer = await stage.accept(worker, attempt, result_rows(0), result_rows(1, 2, 3))
    assert (answer.status, answer.seen) == ("duplicate", {2})
    assert [entry.row_indices for entry in await stage.results()] == [(2,)]
    assert (await stage.record(batch))["accepted"] == "1"
    assert (await stage.accept(worker, attempt, result_rows(0, 1, 3), finish=True)).status == "ok"


async def test_a_whole_group_after_one_of_its_rows_is_a_duplicate(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.accept(worker, attempt, result_rows(3))
    answer = await stage.finish(worker, attempt)
    assert (answer.status, answer.seen) == ("duplicate", {3})
    assert (await stage.record(batch))["status"] == "running"
    assert (await stage.accept(worker, attempt, result_rows(0, 1, 2), finish=True)).status == "ok"


async def test_rows_of_a_former_attempt_stay_accepted(stage: Stage):
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    old = await stage.taken(first)
    await stage.accept(first, old, result_rows(0))
    new = await stage.taken_over(old, second)
    assert (await stage.accept(second, new, result_rows(0, 1))).seen == {0}
    assert (await stage.accept(second, new, result_rows(1, 2, 3), finish=True)).status == "ok"
    assert [(entry.row_indices, entry.attempt) for entry in await stage.results()] == [((0,), 1), ((1, 2, 3), 2)]


async def test_a_finish_that_does_not_cover_every_row_is_refused(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.accept(worker, attempt, result_rows(0))
    answer = await stage.accept(worker, attempt, result_rows(1, 2), finish=True)
    assert (answer.status, answer.detail) == ("incomplete", "1")
    assert (await stage.accept(worker, attempt, finish=True)).status == "incomplete"
    assert (await stage.record(batch))["accepted"] == "1"
    assert len(await stage.results()) == 1
    assert await stage.queued() == [attempt.group.entry]


async def test_a_finish_without_rows_ends_a_group_whose_rows_are_all_there(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.accept(worker, attempt, result_rows(*ALL))
    assert (await stage.accept(worker, attempt, finish=True)).status == "ok"
    assert (await stage.record(batch))["status"] == "done"
    assert await stage.queued() == []


async def test_the_last_acceptance_the_ack_and_the_deletion_are_one_step(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    sent: list[str] = []
    forward = stage.runner.run

    async def record(commands: object) -> object:
        sent.extend(command[0] for command in commands)  # pyright: ignore
        return await forward(commands)  # pyright: ignore

    stage.runner.run = record  # pyright: ignore
    await stage.finish(worker, attempt)
    assert sent == ["MULTI", "XADD", "EVALSHA", "EXEC"]
    assert (await stage.queued(), await stage.pending()) == ([], 0)
    assert len(await stage.results()) == 1
    assert await stage.count(batch, "completed") == 1


async def test_a_finish_repeated_after_a_lost_reply_is_told_apart_from_a_stale_one(stage: Stage):
    batch = await stage.sealed()
    zombie, heir = stage.worker("math/0"), stage.worker("math/1")
    old = await stage.taken(zombie)
    new = await stage.taken_over(old, heir)
    assert (await stage.finish(heir, new)).status == "ok"
    assert (await stage.finish(heir, new)).status == "repeated"
    assert (await stage.finish(zombie, old)).status == "stale"
    assert len(await stage.results()) == 1
    assert (await stage.count(batch, "completed"), await stage.count(batch, "stale_writes")) == (1, 1)


async def test_a_finish_repeated_after_the_hand_over_is_still_a_repetition(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.finish(worker, attempt)
    (entry,) = await stage.results()
    await batch.client.handed(batch.id, SHARD, [0], {entry.entry: len(entry.payload)})
    assert (await stage.finish(worker, attempt)).status == "repeated"
    assert await stage.results() == []


async def test_positions_outside_of_the_group_are_refused_and_mark_no_neighbours_row(stage: Stage):
    batch = await stage.sealed(2)
    worker = stage.worker()
    first, second = await stage.taken(worker), await stage.taken(worker)
    with pytest.raises(BrokerError, match="group 0 has 4 rows"):
        await stage.accept(worker, first, result_rows(0, 1, 2, 4), finish=True)
    assert await stage.results() == []
    assert (await stage.finish(worker, second)).status == "ok"
    assert (await stage.record(batch))["accepted"] == "0"


async def test_an_entry_that_claims_fewer_rows_than_its_batch_cannot_finish_early(stage: Stage):
    await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    short = attempt._replace(group=attempt.group._replace(rows=2))
    with pytest.raises(BrokerError, match="has 4 rows"):
        await stage.accept(worker, short, result_rows(0, 1), finish=True)
    assert await stage.queued() == [attempt.group.entry]


async def test_groups_of_more_rows_than_a_double_holds_bits_are_accepted_once_too(stage: Stage):
    size = 70
    client = stage.client()
    await client.own()
    await client.open(BatchSpec("wide", 2, 2 * size, size, (SHARD,)))
    groups = [OutgoingGroup("wide", at, SHARD, "adds", size, at * size, Payload.of([b"x"])) for at in range(2)]
    batch = Batch("wide", client, groups)
    stage.batches.append(batch)
    await stage.published(batch)
    worker = stage.worker()
    attempts = [await stage.taken(worker) for _ in range(2)]
    for attempt in attempts:
        whole = result_rows(*range(size))
        assert (await stage.accept(worker, attempt, whole, finish=True)).status == "ok"
        assert (await stage.accept(worker, attempt, whole, finish=True)).status == "repeated"
    assert await stage.raw("BITCOUNT", stage.keys.accepted("wide")) == 2 * size


async def test_whole_groups_do_not_touch_their_neighbours_bits(stage: Stage):
    await stage.sealed(3)
    worker = stage.worker()
    attempts = [await stage.taken(worker) for _ in range(3)]
    assert (await stage.finish(worker, attempts[1])).status == "ok"
    assert await stage.raw("GETRANGE", stage.keys.accepted(attempts[1].group.batch), 0, -1) == bytes([0b00001111])
    assert (await stage.finish(worker, attempts[0])).status == "ok"
    assert (await stage.finish(worker, attempts[2])).status == "ok"


async def test_one_refused_acceptance_does_not_harm_the_others_of_a_write(stage: Stage):
    await stage.sealed(2)
    broken = await stage.sealed(1, stage.client("validation"))
    worker = stage.worker()
    first, second, other = [await stage.taken(worker) for _ in range(3)]
    await stage.raw("SET", stage.keys.results("validation", SHARD), "no stream")
    answers = await worker.accept(
        [Acceptance(attempt, [result_rows(*ALL)], finish=True) for attempt in (first, other, second)]
    )
    assert isinstance(answers[1], BrokerError)
    assert [getattr(answer, "status", "") for answer in answers] == ["ok", "", "ok"]
    assert (await stage.record(broken))["status"] == "running"
    await stage.raw("DEL", stage.keys.results("validation", SHARD))


# What is refused leaves no entry


async def test_a_results_key_of_the_wrong_type_finishes_no_group(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    results = stage.keys.results("trainer", SHARD)
    await stage.raw("DEL", results)
    await stage.raw("SET", results, "somebody else's")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await stage.finish(worker, attempt)
    record = await stage.record(batch)
    assert (record["status"], record["accepted"]) == ("running", "0")
    assert await stage.queued() == [attempt.group.entry]
    await stage.raw("DEL", results)


async def test_a_missing_results_stream_finishes_no_group_and_is_not_created(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.raw("DEL", stage.keys.results("trainer", SHARD))
    assert (await stage.finish(worker, attempt)).status == "gone"
    assert (await stage.record(batch))["status"] == "running"
    assert f"results:trainer:{SHARD}" not in await stage.key_names()


async def test_refused_rows_leave_what_was_there_before_alone(stage: Stage):
    await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.accept(worker, attempt, result_rows(0), result_rows(1))
    before = [entry.entry for entry in await stage.results()]
    await stage.accept(worker, attempt, result_rows(0), result_rows(1), result_rows(2))
    await stage.accept(worker, attempt, result_rows(2), finish=True)
    assert [entry.entry for entry in await stage.results()] == before


async def test_unread_bytes_grow_with_what_is_accepted_only(stage: Stage):
    await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    one = Rows((0,), result_rows(0).payload)
    assert (await stage.accept(worker, attempt, one)).unread_bytes == one.payload.size
    await stage.accept(worker, attempt, one)
    rest = result_rows(1, 2, 3)
    total = (await stage.accept(worker, attempt, rest, finish=True)).unread_bytes
    assert total == one.payload.size + rest.payload.size


async def test_a_blocked_reader_sees_nothing_of_what_was_refused_and_then_what_counts(real_stage: Stage):
    """Redis wakes the reader with an empty list of entries, Valkey not at all. fakeredis cannot block."""
    await real_stage.sealed()
    worker = real_stage.worker()
    attempt = await real_stage.taken(worker)
    assert isinstance(real_stage.runner, Link)
    reader = await Channel.open(real_stage.runner.settings, "reader")
    command = ("XREAD", "BLOCK", 10_000, "STREAMS", real_stage.keys.results("trainer", SHARD), "0")
    try:
        read = reader.send([command])
        while b"cmd=xread" not in await real_stage.raw("CLIENT", "LIST"):
            pass
        assert (await real_stage.accept(worker, attempt, result_rows(0, 1), finish=True)).status == "incomplete"
        assert (await real_stage.accept(worker, attempt, result_rows(3))).status == "ok"
        seen = (await read)[0][0][1] or (await reader.execute(*command))[0][1]
        assert [parse_result(*entry).row_indices for entry in seen] == [(3,)]
    finally:
        await reader.close()


@pytest.mark.parametrize("again", [BrokerFullError("maxmemory"), None])
async def test_a_finish_that_ran_before_its_rows_is_sent_again_after_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, again: RolloutBusError | None
):
    """Room came between two steps of one write, or somebody loaded the scripts: the group failed, and ran once more."""
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    sent: list[int] = []

    async def refused_first(runner: Runner, steps: Sequence[Step]) -> list[list[Any] | Exception]:
        sent.append(len(steps))
        if len(sent) > 1:
            return await run_steps(runner, steps)
        later = await run_steps(runner, steps[1:])
        # Refused as a whole, or forgotten and repeated by `run_steps` after the other one.
        return [again or (await run_steps(runner, steps[:1]))[0], *later]

    monkeypatch.setattr(worker_transitions, "run_steps", refused_first)
    answers = await worker.accept(
        [
            Acceptance(attempt, [result_rows(*range(SIZE - 1))], finish=False),
            Acceptance(attempt, [result_rows(SIZE - 1)], finish=True),
        ]
    )
    assert [getattr(answer, "status", answer) for answer in answers] == ["ok", "ok"]
    assert (await stage.record(batch))["status"] == "done"
    assert sorted(at for entry in await stage.results() for at in entry.row_indices) == list(range(SIZE))
    assert await stage.count(batch, "duplicate_rows") == 0

"""fail, retry, dead letters, crashes and expiry: a group comes again or ends with everything one needs to understand
it.
"""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.messages import Failure

from tests.broker.contract.stage import FAILURE, SHARD, Batch, Stage, result_rows

DATA = Failure("data", "ValueError", "bad row")


async def expire(batch: Batch, reason: str, *, timeout_s: float = 3600.0, group: int = 0) -> str:
    failure = dataclasses.replace(FAILURE, type="DeadlineExceeded")
    return await batch.client.expire(
        SHARD, batch.groups[group], batch.entries.get(group, ""), reason, timeout_s, failure
    )


async def test_a_failed_attempt_waits_in_delayed_until_it_is_due(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker("math/0")
    attempt = await stage.taken(worker)
    assert await worker.fail(attempt, FAILURE, limit=5, delay_s=60) == "retry"
    assert (await stage.record(batch))["status"] == "delayed"
    assert (await stage.pending(), await stage.queued()) == (0, [attempt.group.entry])
    claimed = await stage.worker("math/1").claim(10, observing=True, peers=())
    assert claimed.entries == []
    assert claimed.next_due_ms is not None
    assert 59_000 < claimed.next_due_ms <= 60_000
    assert await stage.count(batch, "retries") == 1


async def test_a_due_retry_is_claimed_once_with_its_failures_counted(stage: Stage):
    await stage.sealed()
    worker = stage.worker("math/0")
    await worker.fail(await stage.taken(worker), FAILURE, limit=5, delay_s=0)
    heir = stage.worker("math/1")
    group = await stage.claimed(heir)
    assert (await worker.claim(10, observing=True, peers=())).entries == []
    taken = await heir.take(group, "t", observing=True, crash_limit=5)
    assert (taken.attempt, taken.infra_failures, taken.data_failures) == (2, 1, 0)


async def test_the_instance_that_failed_is_avoided_unless_it_is_alone(stage: Stage):
    await stage.sealed()
    worker = stage.worker("math/0")
    await worker.fail(await stage.taken(worker), FAILURE, limit=5, delay_s=0)
    assert (await worker.claim(10, observing=True, peers=["math/1"])).entries == []
    assert (await stage.claimed(worker, peers=())).group == 0


async def test_a_group_goes_to_whoever_has_not_failed_it_before_it_comes_again_to_one_that_has(stage: Stage):
    await stage.sealed()
    workers = {label: stage.worker(label) for label in ("math/0", "math/1", "math/2")}
    group = await stage.delivered(workers["math/0"])
    for label in ("math/0", "math/1"):
        await workers[label].fail(await stage.taken(workers[label], group), FAILURE, limit=9, delay_s=0)
        if label == "math/0":
            await stage.claimed(workers["math/1"])

    async def claims(label: str, *peers: str) -> int:
        return len((await workers[label].claim(10, observing=True, peers=peers)).entries)

    assert await claims("math/0", "math/1", "math/2") == 0
    assert await claims("math/1", "math/0", "math/2") == 0
    assert await claims("math/1", "math/0") == 0, "it failed there last"
    assert await claims("math/0", "math/1") == 1, "no peer is left that has not failed it"
    await workers["math/0"].fail(await stage.taken(workers["math/0"], group), FAILURE, limit=9, delay_s=0)
    assert await claims("math/0", "math/1", "math/2") == 0
    assert await claims("math/2", "math/0", "math/1") == 1


async def test_a_retry_that_failed_everywhere_is_left_to_others_than_the_last(stage: Stage):
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    group = await stage.delivered(first)
    for worker, heir in ((first, second), (second, first)):
        await worker.fail(await stage.taken(worker, group), FAILURE, limit=9, delay_s=0)
        peer = ["math/1"] if worker is first else ["math/0"]
        assert (await worker.claim(10, observing=True, peers=peer)).entries == []
        assert await stage.claimed(heir, peers=["math/0", "math/1"]) == group


async def test_retries_that_are_left_to_others_hide_none_that_may_run_here(stage: Stage):
    """Four times as many as there were free slots were looked at."""
    await stage.sealed(71)
    mine, other = stage.worker("math/0"), stage.worker("math/1")
    for _ in range(70):
        await mine.fail(await stage.taken(mine), FAILURE, limit=9, delay_s=0)
    last = await stage.taken(other)
    await other.fail(last, FAILURE, limit=9, delay_s=0)
    assert await stage.claimed(mine, peers=["math/1"]) == last.group


async def test_a_retry_that_waited_long_for_others_may_run_anywhere(stage: Stage):
    """They may live and have no place for it, until its time is over."""
    await stage.sealed()
    worker = stage.worker("math/0")
    await worker.fail(await stage.taken(worker), FAILURE, limit=5, delay_s=0)
    await asyncio.sleep(0.05)
    assert (await worker.claim(10, observing=True, peers=["math/1"], patience_s=60.0)).entries == []
    assert len((await worker.claim(10, observing=True, peers=["math/1"], patience_s=0.01)).entries) == 1


async def test_each_class_of_failures_has_its_own_budget(stage: Stage):
    await stage.sealed()
    worker = stage.worker()
    group, ends = await stage.delivered(worker), list[str]()
    for failure, limit in ((DATA, 2), (FAILURE, 3), (FAILURE, 3), (DATA, 2)):
        ends.append(await worker.fail(await stage.taken(worker, group), failure, limit=limit, delay_s=0))
        if ends[-1] == "retry":
            await stage.claimed(worker)
    assert ends == ["retry", "retry", "retry", "dead"]


async def test_a_dead_letter_holds_the_whole_entry_and_why_it_died(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker("math/0")
    attempt = await stage.taken(worker)
    assert await worker.fail(attempt, DATA, limit=1, delay_s=0) == "dead"
    (letter,) = await stage.dead_letters()
    expected = {
        b"kind": b"group", b"batch": batch.id.encode(), b"group": b"0", b"client": b"trainer", b"route": b"adds",
        b"rows": b"4", b"first_row": b"0", b"payload": b"rows of a group",
        b"reason": b"ValueError: bad row", b"failed_attempt": b"1", b"failed_on": b"math/0",
    }  # fmt: skip
    failure = letter.pop(b"failure")
    assert letter == expected
    assert Failure.unpacked(failure) == dataclasses.replace(DATA, instance="math/0", attempt=1)


async def test_a_dead_group_is_told_to_the_client_and_stands_in_the_books(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker("math/0")
    await worker.fail(await stage.taken(worker), DATA, limit=1, delay_s=0)
    (entry,) = await stage.results()
    assert (entry.kind, entry.group, entry.row_indices, entry.attempt) == ("failed", 0, (0, 1, 2, 3), 1)
    assert Failure.unpacked(entry.payload).message == "bad row"
    assert await stage.count(batch, "unread_bytes") == len(entry.payload)
    assert (await stage.queued(), await stage.pending()) == ([], 0)
    books = await batch.close()
    assert books is not None
    assert (books.published, books.failed, books.dead_groups) == (1, 1, 1)
    assert books.balanced


@pytest.mark.parametrize(("limit", "end"), [(5, "retry"), (1, "dead")])
async def test_a_failure_reported_again_after_a_lost_reply_counts_once(stage: Stage, limit: int, end: str):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    ends = [await worker.fail(attempt, FAILURE, limit=limit, delay_s=0) for _ in range(2)]
    assert ends == [end, end]
    assert (await stage.record(batch))["infra"] == "1"
    assert await stage.count(batch, "stale_writes") == 0
    assert len(await stage.dead_letters()) == (end == "dead")


async def test_a_failure_after_accepted_rows_keeps_them(stage: Stage):
    await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.accept(worker, attempt, result_rows(1))
    await worker.fail(attempt, FAILURE, limit=5, delay_s=0)
    taken = await worker.take(await stage.claimed(worker), "t", observing=True, crash_limit=5)
    assert taken.accepted == {1}


async def test_a_group_that_kills_its_instances_is_buried_by_the_crash_budget(stage: Stage):
    batch = await stage.sealed()
    workers = [stage.worker(f"math/{at}") for at in range(3)]
    attempt = await stage.taken(workers[0])
    attempt = await stage.taken_over(attempt, workers[1], crash_limit=2)
    await stage.expire_lease(attempt.group)
    group = await stage.claimed(workers[2])
    assert (await workers[2].take(group, "t", observing=True, crash_limit=2)).status == "dead"
    (letter,) = await stage.dead_letters()
    assert (letter[b"reason"], letter[b"failed_on"], letter[b"payload"]) == (b"crashed", b"math/1", b"rows of a group")
    assert [entry.kind for entry in await stage.results()] == ["failed"]
    assert (await stage.queued(), await stage.pending()) == ([], 0)
    assert await workers[1].fail(attempt, FAILURE, limit=5, delay_s=0) == "stale"
    assert await stage.count(batch, "failed") == 1


async def test_only_lost_leases_count_as_crashes(stage: Stage):
    """A worker that died between claim and take had not begun."""
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    group = await stage.delivered(first)
    await stage.expire_lease(group)
    taken = await second.take(await stage.claimed(second), "t", observing=True, crash_limit=1)
    assert (taken.status, taken.attempt, taken.infra_failures) == ("ok", 1, 0)


async def test_without_a_results_stream_a_group_still_dies_in_the_books(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.raw("DEL", stage.keys.results("trainer", SHARD))
    assert await worker.fail(attempt, DATA, limit=1, delay_s=0) == "dead"
    assert await stage.count(batch, "failed") == 1
    assert f"results:trainer:{SHARD}" not in await stage.key_names()


# Expiry, by the client


async def test_a_deadline_counts_from_the_first_take_over_all_attempts(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    assert await expire(batch, "deadline", timeout_s=0) == "early"
    attempt = await stage.taken(worker)
    await worker.fail(attempt, FAILURE, limit=5, delay_s=60)
    assert await expire(batch, "deadline", timeout_s=3600) == "early"
    assert await expire(batch, "deadline", timeout_s=0) == "dead"
    assert await stage.raw("ZCARD", stage.keys.delayed(SHARD)) == 0
    assert await stage.queued() == []
    assert (await stage.finish(worker, attempt)).status == "stale"


async def test_a_running_group_that_is_over_its_deadline_is_taken_from_its_holder(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    assert await expire(batch, "deadline", timeout_s=0) == "dead"
    assert await stage.renew(worker, attempt) == ["lost"]
    assert (await stage.finish(worker, attempt)).status == "stale"
    assert [entry.kind for entry in await stage.results()] == ["failed"]


async def test_without_an_instance_what_has_a_lease_does_not_expire(stage: Stage):
    batch = await stage.sealed(3)
    worker = stage.worker()
    await stage.taken(worker)
    parked = await stage.delivered(worker)
    await stage.raw("HSET", stage.keys.batch(batch.id), "unread_bytes", 1 << 40)
    assert (await worker.take(parked, "t", observing=True, crash_limit=5)).status == "parked"
    ends = [await expire(batch, "no_instance", timeout_s=30, group=group) for group in range(3)]
    assert ends == ["early", "dead", "dead"]
    assert await stage.raw("ZCARD", stage.keys.parked(SHARD)) == 0
    assert await stage.queued() == [batch.entries[0]]
    assert await stage.count(batch, f"queued_bytes:{SHARD}") == 0


async def test_without_an_instance_what_was_lost_with_the_last_one_expires_too(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.expire_lease(attempt.group)
    assert await expire(batch, "no_instance", timeout_s=stage.settings.lease_s) == "dead"
    assert (await stage.finish(worker, attempt)).status == "stale"
    assert [entry.kind for entry in await stage.results()] == ["failed"]


async def test_only_what_is_not_on_the_stream_has_vanished(stage: Stage):
    batch = await stage.sealed(1)
    assert await expire(batch, "vanished") == "early"
    await stage.raw("XDEL", stage.stream, batch.entries[0])
    assert await expire(batch, "vanished") == "dead"
    (letter,) = await stage.dead_letters()
    assert (letter[b"reason"], letter[b"batch"], letter[b"group"]) == (b"vanished", batch.id.encode(), b"0")


async def test_a_group_whose_consumer_was_deleted_by_hand_runs_again(stage: Stage):
    """Pending for nobody, it was taken over by nobody, and its record said that it was running."""
    batch = await stage.sealed(2)
    dead, heir = stage.worker("math/0"), stage.worker("math/1")
    attempt = await stage.taken(dead)
    assert await expire(batch, "vanished") == "early"
    ((_, holder, _, _),) = await stage.raw("XPENDING", stage.stream, "workers", "-", "+", 1)
    await stage.raw("XGROUP", "DELCONSUMER", stage.stream, "workers", holder)
    assert [await expire(batch, "vanished", group=group) for group in range(2)] == ["again", "early"]
    assert await expire(batch, "vanished") == "early"
    again = await stage.taken(heir, await stage.claimed(heir))
    assert (again.group.group, again.number) == (0, 2)
    assert (await stage.finish(dead, attempt)).status == "stale"
    assert (await stage.finish(heir, again)).status == "ok"


async def test_what_waits_in_no_queue_that_is_left_runs_again(stage: Stage):
    """A consumer was deleted between its claim and its take, another time the queue of retries."""
    batch = await stage.sealed(1)
    worker = stage.worker("math/0")
    await worker.fail(await stage.taken(worker), FAILURE, limit=5, delay_s=60)
    assert await expire(batch, "vanished") == "early"
    await stage.raw("DEL", stage.keys.delayed(SHARD))
    assert await expire(batch, "vanished") == "again"
    heir = stage.worker("math/1")
    attempt = await stage.taken(heir, await stage.claimed(heir))
    assert (await stage.finish(heir, attempt)).status == "ok"


async def test_without_a_consumer_group_nothing_is_an_error_and_only_absence_ends_a_group(stage: Stage):
    """The look at the first such group failed, and nothing behind it was looked after any more."""
    batch = await stage.sealed(2)
    await stage.taken(stage.worker())
    await stage.raw("XGROUP", "DESTROY", stage.stream, "workers")
    assert [await expire(batch, "vanished", group=group) for group in range(2)] == ["early", "early"]
    assert [await expire(batch, "no_instance", timeout_s=30, group=group) for group in range(2)] == ["dead", "dead"]
    await stage.worker().prepare()


async def test_a_group_that_was_passed_over_by_hand_runs_after_all(stage: Stage):
    batch = await stage.sealed(1)
    await stage.raw("XGROUP", "SETID", stage.stream, "workers", "$")
    assert await expire(batch, "vanished") == "again"
    worker = stage.worker()
    attempt = await stage.taken(worker, await stage.claimed(worker))
    assert attempt.number == 1
    assert (await stage.finish(worker, attempt)).status == "ok"
    assert await stage.count(batch, f"queued_bytes:{SHARD}") == 0


async def test_a_group_that_ended_cannot_expire(stage: Stage):
    batch = await stage.sealed(2)
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    await worker.fail(await stage.taken(worker), DATA, limit=1, delay_s=0)
    assert [await expire(batch, "deadline", timeout_s=0, group=group) for group in range(2)] == ["over", "over"]


async def test_a_group_whose_entry_nobody_knows_ends_once_no_entry_is_left(stage: Stage):
    """Its publication was repeated, which tells no entry, and somebody deleted the stream before anybody took it."""
    batch = await stage.opened(2)
    await batch.client.publish(batch.groups)
    assert [answer.entry for answer in await stage.published(batch)] == ["", ""]
    assert await expire(batch, "vanished") == "early"
    await stage.raw("DEL", stage.stream)
    await stage.worker().prepare()
    assert [await expire(batch, "vanished", group=group) for group in range(2)] == ["dead", "dead"]


async def test_only_the_owner_lets_a_group_expire(stage: Stage):
    batch = await stage.sealed()
    foreign = Batch(batch.id, stage.client(incarnation="second"), batch.groups, batch.entries)
    assert await expire(foreign, "no_instance") == "not-owner"
    await batch.close()
    assert await expire(batch, "no_instance") == "gone"
    assert await stage.dead_letters() == []


async def test_an_unknown_class_of_failure_is_an_error_and_changes_nothing(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    before = await stage.record(batch)
    with pytest.raises(RolloutBusError):
        await worker.fail(attempt, dataclasses.replace(FAILURE, failure_class="cosmic"), limit=5, delay_s=0)
    assert await stage.record(batch) == before


async def test_groups_on_their_last_chance_run_one_at_a_time_on_an_instance(stage: Stage):
    """The one that kills its instances must not take the others with it."""
    await stage.sealed(2)
    dead, heir = stage.worker("math/0"), stage.worker("math/1")
    await heir.register()
    lost = [await stage.taken(dead) for _ in range(2)]
    first = await stage.taken_over(lost[0], heir, crash_limit=2)
    await stage.expire_lease(lost[1].group)
    group = await stage.claimed(heir)
    assert (await heir.take(group, "t", observing=True, crash_limit=2)).status == "suspect"
    await all_delayed_due(stage)
    # An instance that does not run one already may have it, this one not; and nothing is due soon for this one.
    left = await heir.claim(10, observing=True, peers=())
    assert (left.entries, left.next_due_ms) == ([], None)
    await stage.finish(heir, first)
    taken = await heir.take(await stage.claimed(heir), "t", observing=True, crash_limit=2)
    assert (taken.status, taken.attempt, taken.infra_failures) == ("ok", 2, 1)


async def test_of_groups_on_their_last_chance_an_instance_claims_one_and_leaves_the_others_to_its_peers(stage: Stage):
    """It claimed all of them, was killed by the first, and the others waited for another lease."""
    await stage.sealed(3)
    dead, heir, peer = (stage.worker(f"math/{at}") for at in range(3))
    await heir.register()
    await peer.register()
    lost = [await stage.taken(dead) for _ in range(3)]
    running = await stage.taken_over(lost[0], heir, crash_limit=2)
    for attempt in lost[1:]:
        await stage.expire_lease(attempt.group)
        status = (await heir.take(await stage.claimed(heir), "t", observing=True, crash_limit=2)).status
        assert status == "suspect"
    await stage.finish(heir, running)
    await all_delayed_due(stage)
    assert [len((await worker.claim(10, observing=True, peers=["math/1"])).entries) for worker in (heir, peer)] == [
        1,
        1,
    ]


@pytest.mark.parametrize("released", [True, False])
async def test_a_last_chance_that_did_not_come_to_its_end_is_one_still(stage: Stage, released: bool):
    """After a drain two such groups could run side by side, and one be lost with the other."""
    batch = await stage.sealed(2)
    dead, heir = stage.worker("math/0"), stage.worker("math/1")
    await heir.register()
    lost = [await stage.taken(dead) for _ in range(2)]
    first = await stage.taken_over(lost[0], heir, crash_limit=2)
    await stage.expire_lease(lost[1].group)
    assert (await heir.take(await stage.claimed(heir), "t", observing=True, crash_limit=2)).status == "suspect"
    # Repeated after a lost reply.
    for _ in range(2):
        if released:
            assert await heir.release(first) == "ok"
        else:
            assert await heir.fail(first, DATA, limit=3, delay_s=0.0) == "retry"
    assert (await stage.record(batch))["status"] == "suspect"
    assert await stage.count(batch, "stale_writes") == 0
    await all_delayed_due(stage)
    assert len((await heir.claim(10, observing=True, peers=())).entries) == 1


async def all_delayed_due(stage: Stage) -> None:
    delayed = stage.keys.delayed(SHARD)
    for member in await stage.raw("ZRANGE", delayed, 0, -1):
        await stage.raw("ZADD", delayed, 0, member)

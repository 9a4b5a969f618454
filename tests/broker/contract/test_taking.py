"""take, claim, renew, release: who may run a group, for how long, and after whom."""

from __future__ import annotations

from rolloutbus.broker.client_transitions import ClientTransitions
from rolloutbus.broker.worker_transitions import Taken, WorkerTransitions

from tests.broker.contract.stage import FAILURE, SHARD, Stage, result_rows


async def take(worker: WorkerTransitions, group: object, token: str = "token", *, observing: bool = True) -> Taken:
    return await worker.take(group, token, observing=observing, crash_limit=5)  # pyright: ignore[reportArgumentType]


async def test_the_first_delivery_is_attempt_1_and_a_take_over_attempt_2(stage: Stage):
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    attempt = await stage.taken(first)
    assert attempt.number == 1
    assert (await stage.taken_over(attempt, second)).number == 2


async def test_taking_again_with_the_same_token_is_the_same_attempt(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    assert (await take(worker, group)).attempt == 1
    again = await take(worker, group)
    assert (again.status, again.attempt, again.infra_failures) == ("ok", 1, 0)
    assert await stage.count(batch, "redeliveries") == 0


async def test_a_first_take_is_told_how_many_groups_of_its_batch_wait(stage: Stage):
    await stage.sealed(groups=3)
    worker = stage.worker()
    told = [(await take(worker, await stage.delivered(worker), f"token {at}")).waiting for at in range(3)]
    assert told == [2, 1, 0]


async def test_only_the_consumer_that_was_given_an_entry_takes_it(stage: Stage):
    batch = await stage.sealed()
    group = await stage.delivered(stage.worker("math/0"))
    assert (await take(stage.worker("math/1"), group)).status == "stale"
    assert (await stage.record(batch))["status"] == "queued"


async def test_a_former_holder_cannot_take_what_another_has_claimed(stage: Stage):
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    group = await stage.delivered(first)
    await stage.expire_lease(group)
    assert await stage.claimed(second) == group
    assert (await take(first, group)).status == "stale"
    assert (await take(second, group)).attempt == 1


async def test_a_take_over_is_told_which_rows_are_accepted_and_how_old_the_group_is(stage: Stage):
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    attempt = await stage.taken(first)
    await stage.accept(first, attempt, result_rows(0, 2))
    await stage.expire_lease(attempt.group)
    taken = await take(second, await stage.claimed(second))
    assert taken.accepted == {0, 2}
    assert (taken.infra_failures, taken.data_failures) == (1, 0)
    assert taken.queued_ms >= taken.age_ms >= 0


async def test_an_entry_of_a_closed_batch_is_dropped(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    await batch.client.close(batch.id, {SHARD: []})
    assert (await take(worker, group)).status == "gone"
    assert await stage.queued() == []
    assert await stage.pending() == 0


async def test_a_group_that_the_batch_does_not_know_is_unknown_and_set_aside_whole(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    await stage.raw("HDEL", stage.keys.batch(batch.id), "g:0")
    assert (await take(worker, group)).status == "unknown"
    await worker.set_aside(group.entry, "nobody knows it")
    (letter,) = await stage.dead_letters()
    assert (letter[b"reason"], letter[b"detail"], letter[b"payload"]) == (b"foreign", b"nobody knows it", group.payload)
    assert await stage.queued() == []


async def test_setting_aside_again_gives_no_second_letter(stage: Stage):
    await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    await worker.set_aside(group.entry, "why")
    await worker.set_aside(group.entry, "why")
    assert len(await stage.dead_letters()) == 1


async def test_a_second_entry_of_a_group_that_runs_is_dropped(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    (found,) = await stage.raw("XRANGE", stage.stream, attempt.group.entry, attempt.group.entry)
    await stage.raw("XADD", stage.stream, "*", *found[1])
    assert (await take(worker, await stage.delivered(worker), "other")).status == "gone"
    assert await stage.queued() == [batch.entries[0]]


# Leases


async def test_a_lease_that_expired_is_claimed_only_while_observing(stage: Stage):
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    attempt = await stage.taken(first)
    await stage.expire_lease(attempt.group)
    assert (await second.claim(10, observing=False, peers=())).entries == []
    assert (await second.claim(10, observing=True, peers=())).entries == [attempt.group.entry]


async def test_a_living_lease_is_not_claimed(stage: Stage):
    await stage.sealed()
    await stage.taken(stage.worker("math/0"))
    assert (await stage.worker("math/1").claim(10, observing=True, peers=())).entries == []


async def test_a_renewal_makes_a_lease_new(stage: Stage):
    await stage.sealed()
    worker = stage.worker("math/0")
    attempt = await stage.taken(worker)
    await stage.expire_lease(attempt.group)
    assert await stage.renew(worker, attempt) == ["ok"]
    assert (await stage.worker("math/1").claim(10, observing=True, peers=())).entries == []


async def test_a_claim_that_nobody_took_yet_is_undone_by_the_holders_renewal(stage: Stage):
    await stage.sealed()
    first, second = stage.worker("math/0"), stage.worker("math/1")
    attempt = await stage.taken(first)
    await stage.expire_lease(attempt.group)
    group = await stage.claimed(second)
    assert await stage.renew(first, attempt) == ["ok"]
    assert (await take(second, group)).status == "stale"


async def test_an_attempt_taken_over_can_neither_renew_nor_accept_nor_finish_nor_fail_nor_release(stage: Stage):
    batch = await stage.sealed()
    zombie, heir = stage.worker("math/0"), stage.worker("math/1")
    old = await stage.taken(zombie)
    new = await stage.taken_over(old, heir)
    before = await stage.record(batch)
    assert await stage.renew(zombie, old) == ["lost"]
    assert (await stage.accept(zombie, old, result_rows(0))).status == "stale"
    assert (await stage.finish(zombie, old)).status == "stale"
    assert await zombie.fail(old, FAILURE, limit=5, delay_s=0) == "stale"
    assert await zombie.release(old) == "stale"
    assert await stage.count(batch, "stale_writes") == 5
    assert (await stage.events()).count("refused") == 5
    assert await stage.record(batch) == before
    assert await stage.results() == []
    assert (await stage.finish(heir, new)).status == "ok"


async def test_the_token_is_the_fence_also_under_the_same_name(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    old = await stage.taken(worker)
    new = await stage.taken_over(old, worker)
    assert (await stage.finish(worker, old)).status == "stale"
    assert (await stage.finish(worker, new)).status == "ok"
    assert await stage.count(batch, "stale_writes") == 1


async def test_a_renewal_under_way_while_the_group_finished_is_no_stale_write(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    await stage.finish(worker, attempt)
    assert await stage.renew(worker, attempt) == ["ok"]
    assert await stage.count(batch, "stale_writes") == 0


async def test_a_renewal_tells_of_each_group_by_itself(stage: Stage):
    mine, closed = await stage.sealed(2), await stage.sealed(1)
    worker, heir = stage.worker("math/0"), stage.worker("math/1")
    kept, lost, gone = [await stage.taken(worker) for _ in range(3)]
    await closed.close()
    await stage.taken_over(lost, heir)
    assert await stage.renew(worker, kept, lost, gone) == ["ok", "lost", "gone"]
    assert mine.id == kept.group.batch


async def test_a_renewal_is_refused_when_the_label_belongs_to_another_process(stage: Stage):
    await stage.sealed()
    old, new = stage.worker("math/0"), stage.worker("math/0")
    await old.register()
    assert await stage.renew(old) == []
    await new.register()
    assert await stage.renew(old) is None
    assert await stage.renew(new) == []


async def test_taking_a_label_over_leaves_no_gap_for_the_older_process(stage: Stage):
    old, new = stage.worker("math/0"), stage.worker("math/0")
    await old.register()
    sent: list[list[str]] = []
    forward = stage.runner.run

    async def record(commands: object) -> object:
        sent.append([command[0] for command in commands])  # pyright: ignore
        return await forward(commands)  # pyright: ignore

    stage.runner.run = record  # pyright: ignore
    await new.register()
    assert sent == [["EVALSHA"]]


async def test_an_instance_shows_signs_of_life_that_expire(stage: Stage):
    worker = stage.worker("math/0")
    await worker.register()
    record = stage.keys.instance("math/0")
    assert await stage.raw("HGET", record, "shard") == b"math"
    assert 0 < await stage.raw("PTTL", record) <= stage.settings.instance_ttl_ms


async def test_peers_are_those_of_the_shard_that_show_signs_of_life(stage: Stage):
    first, second = stage.worker("math/0"), stage.worker("math/1")
    assert await first.peers() == ([], None)
    await stage.raw("HSET", stage.keys.shards, SHARD, '{"replicas": 2}')
    await first.register()
    assert await first.peers() == ([], ["math/1"])
    await second.register()
    assert (await first.peers()).living == ["math/1"]
    await second.leave()
    assert (await first.peers()).living == []
    await stage.raw("DEL", stage.keys.shards)


async def test_a_revoked_consumers_groups_can_be_claimed_at_once(stage: Stage):
    from rolloutbus.broker.scripts import SCRIPTS
    from rolloutbus.broker.steps import run_step

    await stage.sealed()
    dead = stage.worker("math/0")
    attempt = await stage.taken(dead)
    consumer = (await stage.raw("XPENDING", stage.stream, "workers", "-", "+", 1))[0][1].decode()
    idle = stage.settings.lease_ms + 1
    reply = await run_step(stage.runner, SCRIPTS["revoke"].call([stage.stream], consumer, idle))
    assert reply == [1]
    assert await stage.claimed(stage.worker("math/1")) == attempt.group


async def test_whoever_leaves_is_off_the_books_unless_he_holds_something(stage: Stage):
    await stage.sealed()
    worker = stage.worker("math/0")
    await worker.register()
    attempt = await stage.taken(worker)
    await worker.leave()
    assert "instance:math/0" not in await stage.key_names()
    assert len(await stage.raw("XINFO", "CONSUMERS", stage.stream, "workers")) == 1
    await stage.finish(worker, attempt)
    await worker.leave()
    assert await stage.raw("XINFO", "CONSUMERS", stage.stream, "workers") == []


async def test_leaving_does_not_remove_the_successors_record(stage: Stage):
    await stage.sealed()
    old, new = stage.worker("math/0"), stage.worker("math/0")
    await old.register()
    await new.register()
    await old.leave()
    assert "instance:math/0" in await stage.key_names()


# Release


async def test_a_group_handed_back_is_no_failure_and_anybodys_at_once(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    assert await worker.release(attempt) == "ok"
    record = await stage.record(batch)
    assert (record["status"], record["infra"], record["data"]) == ("delayed", "0", "0")
    assert await stage.pending() == 0
    again = await take(worker, await stage.claimed(worker, peers=["math/1"]))
    assert (again.attempt, again.infra_failures) == (2, 0)


async def test_handing_back_again_after_a_lost_reply_is_fine(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    assert [await worker.release(attempt), await worker.release(attempt)] == ["ok", "ok"]
    assert await stage.count(batch, "stale_writes") == 0
    assert await stage.claimed(worker) == attempt.group


# Backpressure


async def fill(stage: Stage, batch: str, unread: int) -> None:
    await stage.raw("HSET", stage.keys.batch(batch), "unread_bytes", unread)


async def test_a_new_group_is_parked_while_too_much_is_unread_and_claimed_after(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    await fill(stage, batch.id, stage.settings.max_unread_bytes)
    assert (await take(worker, group)).status == "parked"
    claimed = await worker.claim(10, observing=True, peers=())
    assert (claimed.entries, claimed.parked) == ([], 1)
    await fill(stage, batch.id, stage.settings.max_unread_bytes - 1)
    assert (await take(worker, await stage.claimed(worker))).attempt == 1


async def test_a_parked_group_comes_back_once_results_are_handed_over(stage: Stage):
    small = stage.client(max_unread_bytes=10)
    batch = await stage.sealed(2, small)
    worker = stage.worker()
    await stage.finish(worker, await stage.taken(worker))
    group = await stage.delivered(worker)
    assert (await take(worker, group)).status == "parked"
    (entry,) = await stage.results()
    assert await small.handed(batch.id, SHARD, [0], {entry.entry: len(entry.payload)}) == "ok"
    assert await stage.claimed(worker) == group


async def test_a_paused_batch_does_not_block_another(stage: Stage):
    paused, other = await stage.sealed(3), await stage.sealed(2)
    worker = stage.worker()
    for batch, count in ((paused, 3), (other, 2)):
        await fill(stage, batch.id, 1 << 40)
        for _ in range(count):
            assert (await take(worker, await stage.delivered(worker))).status == "parked"
    await fill(stage, other.id, 0)
    claimed = await worker.claim(2, observing=True, peers=())
    assert claimed.entries == list(other.entries.values())
    assert claimed.parked == 3


async def test_retries_and_take_overs_are_taken_however_much_is_unread(stage: Stage):
    batch = await stage.sealed(2)
    first, second = stage.worker("math/0"), stage.worker("math/1")
    retried, held = await stage.taken(first), await stage.taken(first)
    await first.fail(retried, FAILURE, limit=5, delay_s=0)
    await fill(stage, batch.id, 1 << 40)
    assert (await stage.taken(second, await stage.claimed(second))).number == 2
    assert (await stage.taken_over(held, second)).number == 2


async def test_bytes_count_as_queued_until_the_first_take(stage: Stage):
    batch = await stage.sealed(2)
    size = batch.groups[0].payload.size
    worker = stage.worker()
    attempt = await stage.taken(worker)
    assert await stage.count(batch, f"queued_bytes:{SHARD}") == size
    await worker.release(attempt)
    await stage.taken(worker, await stage.claimed(worker))
    assert await stage.count(batch, f"queued_bytes:{SHARD}") == size


async def test_parked_groups_of_a_batch_that_vanished_are_dropped(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    await fill(stage, batch.id, 1 << 40)
    assert (await take(worker, group)).status == "parked"
    await stage.raw("DEL", stage.keys.batch(batch.id))
    assert (await worker.claim(10, observing=True, peers=())).entries == []
    assert await stage.queued() == []


# Absent owners


async def test_groups_of_an_absent_owner_are_parked_until_it_is_back(stage: Stage):
    batch = await stage.sealed()
    worker = stage.worker()
    group = await stage.delivered(worker)
    await stage.owner_absent(stage.settings.lease_s + 1, batch.client)
    assert (await take(worker, group)).status == "parked"
    assert (await worker.claim(10, observing=True, peers=())).entries == []
    await batch.client.own()
    assert await stage.claimed(worker) == group


async def abandon(stage: Stage, client: ClientTransitions) -> None:
    await stage.owner_absent(stage.settings.abandon_after_s + 1, client)


async def test_a_group_lost_while_its_owner_was_away_is_not_kept_out_by_its_own_rows(stage: Stage):
    """It waited for room with those that had never run, and the rows accepted of it were what took the room."""
    batch = await stage.sealed(1)
    dead, heir = stage.worker("math/0"), stage.worker("math/1")
    attempt = await stage.taken(dead)
    await stage.expire_lease(attempt.group)
    group = await stage.claimed(heir)
    await stage.owner_absent(60, batch.client)
    assert (await heir.take(group, "t", observing=False, crash_limit=5)).status == "parked"
    await batch.client.own()
    await stage.raw("HSET", stage.keys.batch(batch.id), "unread_bytes", 1 << 40)
    for member in await stage.raw("ZRANGE", stage.keys.delayed(SHARD), 0, -1):
        await stage.raw("ZADD", stage.keys.delayed(SHARD), 0, member)
    again = await stage.taken(heir, await stage.claimed(heir))
    assert (await stage.finish(heir, again)).status == "ok"


async def test_groups_of_an_owner_gone_for_good_are_dropped_and_counted(stage: Stage):
    batch = await stage.sealed(3)
    worker = stage.worker()
    running, queued, parked = await stage.taken(worker), await stage.delivered(worker), await stage.delivered(worker)
    await stage.owner_absent(stage.settings.lease_s + 1, batch.client)
    assert (await take(worker, parked)).status == "parked"
    await abandon(stage, batch.client)
    assert await stage.renew(worker, running) == ["gone"]
    assert (await take(worker, queued)).status == "gone"
    assert (await take(worker, await stage.claimed(worker))).status == "gone"
    assert await stage.count(batch, "cancelled") == 3
    told = [words for _, words in await stage.raw("XRANGE", stage.keys.events, "-", "+") if words[1] == b"abandoned"]
    assert [words[3].decode() for words in told] == [batch.id] * 3
    assert sorted(words[5] for words in told) == [b"0", b"1", b"2"]
    assert [(words[7], words[9]) for words in told if words[5] == b"0"] == [(b"1", b"math/0")]
    assert await stage.queued() == []
    assert await stage.count(batch, f"queued_bytes:{SHARD}") == 0
    books = await batch.close()
    assert books is not None
    assert books.balanced


async def test_a_dropped_group_that_is_published_again_is_no_other_one(stage: Stage):
    """The reply to a publication was lost with the connection, and sent again once its group had been dropped."""
    batch = await stage.opened(2)
    await stage.published(batch, 0)
    await abandon(stage, batch.client)
    worker = stage.worker()
    assert (await take(worker, await stage.delivered(worker))).status == "gone"
    await batch.client.own()
    assert [answer.status for answer in await stage.published(batch, 0, 1)] == ["repeated", "ok"]
    assert (await stage.count(batch, "published"), await stage.count(batch, "cancelled")) == (2, 1)
    assert await batch.client.seal(batch.id) == "ok"
    books = await batch.close()
    assert books is not None
    assert (books.published, books.cancelled, books.balanced) == (2, 2, True)


async def test_a_take_that_comes_late_does_not_begin_an_attempt_again_that_has_ended(stage: Stage):
    """Else the attempt that is due counts it as lost with its instance."""
    batch = await stage.sealed()
    worker = stage.worker()
    attempt = await stage.taken(worker)
    assert await worker.fail(attempt, FAILURE, limit=3, delay_s=0) == "retry"
    group = await stage.claimed(worker)
    assert (await take(worker, attempt.group, attempt.token)).status == "stale"
    assert (await stage.record(batch))["status"] == "delayed"
    assert (await take(worker, group, "next")).infra_failures == 1


async def test_nobody_abandons_without_having_observed(stage: Stage):
    batch = await stage.sealed(2)
    worker = stage.worker()
    running, queued = await stage.taken(worker), await stage.delivered(worker)
    await abandon(stage, batch.client)
    assert await stage.renew(worker, running, observing=False) == ["ok"]
    assert (await take(worker, queued, observing=False)).status == "parked"
    assert (await worker.claim(10, observing=False, peers=())).entries == []
    assert await stage.count(batch, "cancelled") == 0
    await batch.client.own()


async def test_entries_deleted_behind_a_workers_back_are_acknowledged_when_read_again(real_stage: Stage):
    """fakeredis leaves deleted entries out of a consumer's history; the servers give them without fields."""
    batch = await real_stage.sealed(2)
    worker = real_stage.worker()
    deleted, kept = await real_stage.delivered(worker), await real_stage.delivered(worker)
    await real_stage.raw("XDEL", real_stage.stream, deleted.entry)
    assert [entry.decode() for entry, _ in await worker.unseen()] == [kept.entry]
    assert await real_stage.pending() == 1
    assert kept._replace(entry=batch.entries[1]) == kept

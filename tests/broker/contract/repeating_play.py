"""Random runs in which whatever was sent is sent again, what must hold in them, and the shortest one that fails."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rolloutbus.broker.client_transitions import cancel_batch
from rolloutbus.broker.errors import RolloutBusError
from rolloutbus.broker.worker_transitions import Acceptance, Attempt, HeldGroup

from tests.broker.contract.repeating import CLIENTS, ENDED, SHARDS, Hands, Plan, Sent, World
from tests.broker.contract.stage import FAILURE, result_rows

Value = TypeVar("Value")
ROUNDS = 40
STEPS = 50
ANY = range(1000)
YES_OR_NO = (True, False)
SOME = [set(some) for count in range(5) for some in itertools.combinations(range(4), count)]
LAYOUTS = [list(layout) for count in range(5) for layout in itertools.product(SHARDS, repeat=count)]
AGAIN = ("accept", "claim", "expire", "fail", "handed", "publish", "release", "renew", "take", "")
# Sent again at once they find more to do.
MAY_FIND_MORE = frozenset({"claim", "leave"})
# What anybody may do: how often, and with what.
MOVES: Mapping[str, tuple[float, Mapping[str, Sequence[Any]]]] = {
    "open": (2, {"client": CLIENTS, "size": range(1, 5), "shards": LAYOUTS, "whole": (True, True, False)}),
    "publish": (3, {"at": ANY, "places": SOME, "heard": YES_OR_NO}),
    "seal": (2, {"at": ANY}),
    "own": (1, {"client": CLIENTS}),
    "owner_is_away": (2, {"client": CLIENTS, "seconds": (31, 700)}),
    "client_comes_back": (2, {"client": CLIENTS}),
    "collect": (4, {"client": CLIENTS}),
    "hand_over": (4, {"at": ANY, "some": SOME}),
    "expire": (2, {"at": ANY, "group": ANY, "reason": ("deadline", "no_instance", "vanished")}),
    "cancel": (1, {"at": ANY}),
    "close": (1, {"at": ANY}),
    "read": (9, {"at": ANY, "take": (True, True, False)}),
    "claim": (5, {"at": ANY, "observing": YES_OR_NO, "take": YES_OR_NO, "peers": YES_OR_NO}),
    "take": (2, {"at": ANY, "entry": ANY, "observing": YES_OR_NO}),
    "accept": (5, {"at": ANY, "positions": SOME[1:], "finish": (True, False, False)}),
    "finish": (3, {"at": ANY}),
    "fail": (4, {"at": ANY, "limit": range(1, 5), "delay_s": (0.0, 1000.0)}),
    "release": (2, {"at": ANY}),
    "renew": (2, {"at": ANY, "observing": YES_OR_NO}),
    "worker_is_replaced": (1, {"at": ANY, "leaves": YES_OR_NO}),
    "lease_expires": (4, {"at": ANY, "shard": SHARDS}),
    "another_takes_over": (6, {"at": ANY, "heir": ANY, "take": (True, True, False)}),
    "retries_are_due": (2, {}),
    "scripts_are_flushed": (1, {}),
    "groups_are_deleted": (0.2, {"shard": SHARDS}),  # afterwards little is as it was
    "a_stranger_writes": (0.5, {"shard": SHARDS}),
    "again_at_once": (6, {}),
    "again": (14, {"at": ANY, "name": AGAIN}),
}  # fmt: skip
Move = tuple[str, dict[str, Any]]


class Repeats:
    """One run; each move does nothing where it has nothing to do. `again` is what a link may do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ended: set[tuple[str, int, str]] = set()
        self.told: list[str] = []

    def begin(self) -> None:
        for name in CLIENTS:
            self.world.hold(name)

    # Clients.
    @property
    def live(self) -> list[Plan]:
        return [plan for plan in self.world.plans if not plan.over]

    @property
    def mine(self) -> list[Plan]:
        """Batches whose client's process lives."""
        return [plan for plan in self.live if plan.process is self.world.processes[plan.process.transitions.client]]

    def _plan(self, at: int) -> Plan:
        return self.mine[at % len(self.mine)]

    def _tried(self, work: Any) -> Any:
        """What a client does may be refused because somebody cancelled, or has its name."""
        try:
            return self.world.run(work)
        except RolloutBusError as error:
            return error

    def open(self, client: str, size: int, shards: list[str], whole: bool) -> None:
        if len(self.live) >= 3:
            return
        plan = self.world.plan(client, size, shards)
        self.world.hold(client)
        self.world.run(plan.process.transitions.open(plan.spec))
        if whole:
            self.world.publish(plan, range(len(shards)), heard=True)
            self._seal(plan)

    def _seal(self, plan: Plan) -> None:
        plan.sealed = self._tried(plan.process.transitions.seal(plan.id)) == "ok" or plan.sealed

    def publish(self, at: int, places: set[int], heard: bool) -> None:
        if not self.mine:
            return
        plan = self._plan(at)
        self.world.publish(plan, [at for at in sorted(places) if at < len(plan.groups)], heard=heard)

    def seal(self, at: int) -> None:
        if not self.mine:
            return
        self._seal(self._plan(at))

    def own(self, client: str) -> None:
        self.world.hold(client)

    def owner_is_away(self, client: str, seconds: int) -> None:
        self.world.owner_absent(client, seconds)

    def client_comes_back(self, client: str) -> None:
        self.world.come_back(client)

    def collect(self, client: str) -> None:
        self.world.collect(client)

    def hand_over(self, at: int, some: set[int]) -> None:
        if not self.mine:
            return
        plan = self._plan(at)
        self.world.hand_over(plan, [group for group in plan.outcomes if group in some])

    def expire(self, at: int, group: int, reason: str) -> None:
        if not any(plan.groups for plan in self.mine):
            return
        plans = [plan for plan in self.mine if plan.groups]
        plan = plans[at % len(plans)]
        self._expire(plan, group % len(plan.groups), reason)

    def _expire(self, plan: Plan, group: int, reason: str) -> str:
        outline, entry = plan.groups[group], plan.entries.get(group, "")
        expire = plan.process.transitions.expire
        return self.world.run(expire(outline.shard, outline, entry, reason, 0, FAILURE))

    def cancel(self, at: int) -> None:
        if not self.live:
            return
        plan = self.live[at % len(self.live)]
        world, client = self.world, plan.process.transitions.client
        self._tried(cancel_batch(world.recorder, world.keys, plan.id, client, plan.shards, "why"))
        plan.cancelled = True

    def close(self, at: int) -> None:
        if not self.mine:
            return
        self._close(self._plan(at))

    def _close(self, plan: Plan) -> None:
        records, ever = self.world.records(plan), set(self.world.names())
        books = self.world.close(plan)
        assert books is not None, plan
        assert books.balanced, books
        assert books.published == len(records) <= len(plan.groups), (books, records)
        states = Counter(record["status"] for record in records.values())
        assert books.completed == states["done"] + states["handed"], (books, records)
        assert books.failed == states["failed"], (books, records)
        failed = [entry.group for entry in plan.seen.values() if entry.kind == "failed"]
        if not plan.damaged:
            assert sorted(failed) == sorted(at for at, record in records.items() if record["status"] == "failed")
            rows = {row for entry in plan.seen.values() if entry.kind == "rows" for row in entry.row_indices}
            for at, record in records.items():
                whole = set(range(at * plan.size, (at + 1) * plan.size))
                assert record["status"] not in ("done", "handed") or whole <= rows, (at, record, rows)
        assert ever >= set(self.world.names()), "a close made keys"

    # Workers.
    def _hands(self, at: int) -> Hands:
        return self.world.hands[at % len(self.world.hands)]

    def read(self, at: int, take: bool) -> None:
        hands = self._hands(at)
        if self.world.read(hands) and take:
            self.world.take(hands, -1, observing=True)

    def claim(self, at: int, observing: bool, take: bool, peers: bool) -> None:
        hands = self._hands(at)
        others = [f"{hands.shard}/{number}" for number in range(2)] if peers else []
        self.world.claim(hands, observing=observing, peers=others)
        while take and hands.given:
            self.world.take(hands, -1, observing=observing)

    def take(self, at: int, entry: int, observing: bool) -> None:
        if not any(hands.given for hands in self.world.hands):
            return
        full = [hands for hands in self.world.hands if hands.given]
        self.world.take(full[at % len(full)], entry, observing=observing)

    def _one(self, at: int) -> tuple[Hands, Attempt]:
        # The last ones are most likely those that run.
        return self.world.attempts[-1 - at % min(len(self.world.attempts), 6)]

    def _as(self, attempt: Attempt, work: Coroutine[Any, Any, Value]) -> Value:
        """A step of this attempt, which changes nothing where another is the current one."""
        group = attempt.group
        current = self.world.is_current(group.batch, group.group, attempt.token)
        before = None if current else self.world.digest()
        answer = self.world.run(work)
        if before is not None:
            self.world.check_same(before, (group.batch, group.group, attempt.token, answer))
        return answer

    def _accept(self, hands: Hands, attempt: Attempt, positions: Sequence[int], *, finish: bool) -> Any:
        rows = [result_rows(*positions)] if positions else []
        return self._as(attempt, hands.transitions.accept([Acceptance(attempt, rows, finish)]))[0]

    def accept(self, at: int, positions: set[int], finish: bool) -> None:
        if not self.world.attempts:
            return
        hands, attempt = self._one(at)
        self._accept(hands, attempt, [at for at in sorted(positions) if at < attempt.group.rows], finish=finish)

    def finish(self, at: int) -> None:
        if not self.world.attempts:
            return
        self._finish(*self._one(at))

    def _finish(self, hands: Hands, attempt: Attempt) -> str:
        answer = self._accept(hands, attempt, range(attempt.group.rows), finish=True)
        if answer.status == "duplicate":
            rest = [at for at in range(attempt.group.rows) if at not in answer.seen]
            answer = self._accept(hands, attempt, rest, finish=True)
            assert answer.status == "ok", answer
        return answer.status

    def fail(self, at: int, limit: int, delay_s: float) -> None:
        if not self.world.attempts:
            return
        hands, attempt = self._one(at)
        self._as(attempt, hands.transitions.fail(attempt, FAILURE, limit=limit, delay_s=delay_s))

    def release(self, at: int) -> None:
        if not self.world.attempts:
            return
        hands, attempt = self._one(at)
        self._as(attempt, hands.transitions.release(attempt))

    def renew(self, at: int, observing: bool) -> None:
        if not self.world.attempts:
            return
        hands, attempt = self._one(at)
        held = HeldGroup(attempt.group.batch, attempt.group.entry, attempt.group.group, attempt.token)
        before = self.world.pending(hands.shard)
        current = self.world.is_current(held.batch, held.group, held.token)
        self.world.run(hands.transitions.renew([held], 4, observing=observing))
        state = self.world.raw("HGET", self.world.keys.batch(held.batch), "state")
        if not current and state not in (None, b"closed"):
            assert self.world.pending(hands.shard) == before, "a renewal by an attempt that lost its lease"

    def worker_is_replaced(self, at: int, leaves: bool) -> None:
        place = at % len(self.world.hands)
        hands, label = self.world.hands[place], ("math/0", "math/1", "code/0")[place]
        if leaves:
            self.world.run(hands.transitions.leave())
        self.world.hands[place] = self.world.worker(hands.shard, label)

    # Time, and others.
    def lease_expires(self, at: int, shard: str) -> None:
        pending = sorted(self.world.pending(shard))
        if pending:
            self.world.lease_expires(shard, pending[at % len(pending)])

    def another_takes_over(self, at: int, heir: int, take: bool) -> None:
        shard = SHARDS[at % len(SHARDS)]
        self.lease_expires(at, shard)
        hands = [hands for hands in self.world.hands if hands.shard == shard]
        chosen = hands[heir % len(hands)]
        if self.world.claim(chosen, observing=True) and take and chosen.given:
            self.world.take(chosen, -1, observing=True)

    def retries_are_due(self) -> None:
        self.world.retries_are_due()

    def scripts_are_flushed(self) -> None:
        self.world.raw("SCRIPT", "FLUSH")

    def groups_are_deleted(self, shard: str) -> None:
        self.world.raw("DEL", self.world.keys.groups(shard))
        self.world.damaged.add(shard)

    def a_stranger_writes(self, shard: str) -> None:
        hands = next(hands for hands in self.world.hands if hands.shard == shard)
        self.world.run(hands.transitions.prepare())
        entry = self.world.raw("XADD", self.world.keys.groups(shard), "*", "what", "ever").decode()
        self.world.run(hands.transitions.set_aside(entry, "a stranger's"))

    def again_at_once(self) -> None:
        sent = self.world.recorder.last
        if sent is None:
            return
        before = self.world.digest()
        self.world.run(self.world.recorder.again(sent))
        if not any(name in MAY_FIND_MORE for name, _ in sent.calls):
            self.world.check_same(before, sent)

    def again(self, at: int, name: str) -> None:
        """One that calls this script; any, where it is nothing."""
        choice = [sent for sent in self.world.recorder.sent if not name or sent.calls[0][0] == name]
        if not choice:
            return
        sent = choice[-1 - at % len(choice)]
        self.told.append(repr(sent))
        if self._is_known(sent):
            return
        before = None if self.world.may_change(sent) else self.world.digest()
        self.world.run(self.world.recorder.again(sent))
        if before is not None:
            self.world.check_same(before, sent)

    def _is_known(self, sent: Sent) -> bool:
        """An open that comes after the close; its batch lives until its keys expire."""
        over = {plan.id for plan in self.world.plans if plan.over}
        return sent.calls[0][0] == "open" and bool(sent.batches & over)

    # What holds at any time.
    def each_row_and_each_failure_comes_once(self) -> None:
        self.world.see()
        for plan in self.world.plans:
            rows = Counter(row for entry in plan.seen.values() if entry.kind == "rows" for row in entry.row_indices)
            failures = Counter(entry.group for entry in plan.seen.values() if entry.kind == "failed")
            assert max([*rows.values(), *failures.values()], default=1) == 1, (rows, failures)

    def the_books_are_right(self) -> None:
        for plan in self.live:
            fields, records = self.world.fields(plan), self.world.records(plan)
            if not fields:
                continue
            states = Counter(record["status"] for record in records.values())
            assert int(fields["published"]) == len(records)
            assert int(fields["completed"]) == states["done"] + states["handed"]
            assert int(fields["failed"]) == states["failed"]
            left = sum(count for status, count in states.items() if status not in ENDED)
            cancelled = states["abandoned"] + (left if fields["state"] == "closed" else 0)
            assert int(fields["cancelled"]) == cancelled
            there = [entry for _, entry in self.world.results(plan.process.transitions.client)]
            unread = sum(len(e.payload) for e in there if e.batch == plan.id and e.kind != "cancelled")
            if not plan.damaged:
                assert int(fields.get("unread_bytes", 0)) == unread
            for shard in SHARDS:
                waiting = [
                    r for at, r in records.items() if plan.groups[at].shard == shard and r["status"] not in ENDED
                ]
                queued = sum(int(record["bytes"]) for record in waiting if record["attempt"] == "0")
                assert int(fields.get(f"queued_bytes:{shard}", 0)) == queued

    def what_has_ended_does_not_run_again(self) -> None:
        for plan in self.live:
            for at, record in self.world.records(plan).items():
                attempt = (plan.id, at, record["token"])
                if record["status"] != "running":
                    self.ended.add(attempt)
                assert record["status"] != "running" or attempt not in self.ended, (attempt, record)
                stream = self.world.keys.groups(plan.groups[at].shard)
                if record["status"] in ENDED and record["entry"] not in ("-", "0-1"):
                    assert self.world.raw("XRANGE", stream, record["entry"], record["entry"]) == [], (attempt, record)

    def nothing_waits_for_ever(self) -> None:
        found = {shard: self.world.deliverable(shard) for shard in SHARDS}
        for plan in self.live:
            if self.world.fields(plan).get("state") not in ("open", "sealed"):
                continue
            for at, record in self.world.records(plan).items():
                shard = plan.groups[at].shard
                if record["status"] not in ENDED and shard not in self.world.damaged:
                    assert (plan.id, str(at)) in found[shard], (plan.id, at, record)

    def check(self) -> None:
        self.each_row_and_each_failure_comes_once()
        self.the_books_are_right()
        self.what_has_ended_does_not_run_again()
        self.nothing_waits_for_ever()

    # The end.
    def end(self) -> None:
        if not self.world.plans:
            return
        for client in CLIENTS:
            self.world.owner_absent(client, 31)
            self.world.hold(client)
        for plan in self.live:
            self._take_up(plan)
        for _ in range(ROUNDS):
            if not self._round():
                break
        else:
            left = {plan.id: self.world.records(plan) for plan in self.mine}
            raise AssertionError(f"somebody waits for ever: {left}")
        for plan in self.mine:
            self._close(plan)
        self._round()
        self.world.check_nothing_left()

    def _take_up(self, plan: Plan) -> None:
        """Whoever can goes on with it; what cannot is cancelled."""
        if plan in self.mine and not plan.cancelled:
            self.world.publish(plan, range(len(plan.groups)), heard=True)
            for shard in SHARDS:
                if not self.world.raw("EXISTS", self.world.keys.groups(shard)):
                    self._tried(plan.process.transitions.open(plan.spec))
                    self.world.publish(plan, range(len(plan.groups)), heard=True)
            self._seal(plan)
        elif plan not in self.mine:
            world, client = self.world, plan.process.transitions.client
            self._tried(cancel_batch(world.recorder, world.keys, plan.id, client, plan.shards, "nobody's"))
            plan.cancelled = True

    def _round(self) -> bool:
        """Time passes and everybody works; whether anything is left to do."""
        self.world.all_leases_expire()
        self.world.retries_are_due()
        for hands in self.world.hands:
            self.world.run(hands.transitions.prepare())
            hands.given.clear()
            while self.world.claim(hands, observing=True) or self.world.read(hands):
                while hands.given:
                    if self.world.take(hands, -1, observing=True) == "ok":
                        self._finish(*self.world.attempts[-1])
        for client in CLIENTS:
            self.world.collect(client)
        for plan in self.mine:
            self.world.hand_over(plan, list(plan.outcomes))
        return self._sweep()

    def _sweep(self) -> bool:
        busy = False
        for plan in self.mine:
            for group, record in self.world.records(plan).items() if not plan.cancelled else ():
                if record["status"] not in ENDED:
                    busy = True
                    if plan.groups[group].shard in self.world.damaged:
                        self._expire(plan, group, "vanished")
            busy = busy or bool(plan.collection and plan.collection.unfinished() and not plan.cancelled)
        return busy


def draw(luck: random.Random) -> list[Move]:
    weights = [weight for weight, _ in MOVES.values()]
    names = ["open", *luck.choices(list(MOVES), weights, k=STEPS)]
    return [(name, {word: luck.choice(values) for word, values in MOVES[name][1].items()}) for name in names]


def fault(world: World, moves: Sequence[Move]) -> tuple[BaseException, list[str]] | None:
    """What goes wrong in this run, and what was sent again in it."""
    run = Repeats(world)
    try:
        run.begin()
        for name, words in moves:
            getattr(run, name)(**words)
            run.check()
        run.end()
    except Exception as error:
        return error, run.told
    finally:
        world.forget()
    return None


def play(make: Callable[[], World], runs: int, seed: int) -> None:
    for number in range(seed, seed + runs):
        moves = draw(random.Random(number))
        if fault(make(), moves) is None:
            continue
        size = len(moves)
        while size:
            # What goes wrong with less is told with less.
            for at in range(len(moves) - size, -1, -size):
                fewer = moves[:at] + moves[at + size :]
                if fault(make(), fewer):
                    moves = fewer
            size //= 2
        found = fault(make(), moves)
        assert found
        error, told = found
        steps = "\n".join(f"  {name} {words}" for name, words in moves)
        again = "\n".join(f"  {sent}" for sent in told)
        raise AssertionError(f"run {number}:\n{steps}\nsent again:\n{again}\n{error!r}") from error

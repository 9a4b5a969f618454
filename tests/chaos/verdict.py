"""Whether a schedule kept the design's promises: pure functions over what was logged and what the broker held at last.

The broker's `events` stream is the second witness: a row that was accepted twice and dropped is in no journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.chaos.evidence import Evidence, Line
from tests.chaos.plan import BatchPlan
from tests.chaos.waiting import waited_too_long

# A row's result that came from somewhere else says more than its key.
IDENTITY = ("label", "attempt", "call")
# What rows may carry that no attempt outlives.
DOOMED = ("always", "kill")
CAN_CUT_TRAINER_OFF = ("net-silent", "net-reset", "net-slow", "trainer-paused", "mixed")


def violations(evidence: Evidence) -> list[str]:
    """Everything that is wrong, in words; empty when all promises were kept."""
    found = [*_groups(evidence), *_rows(evidence), *_keys(evidence), *waited_too_long(evidence)]
    if not evidence.trainer_gone:
        found += _batches(evidence)
    if not evidence.data_lost:
        found += _events(evidence)
    return found


def _batches(evidence: Evidence) -> Iterator[str]:
    for number, batch in enumerate(evidence.plan.batches):
        closed = [line for line in evidence.journal if line["kind"] == "closed" and line["number"] == number]
        if len(closed) != 1:
            yield f"batch {number} was closed {len(closed)} times"
            continue
        yield from _complete(evidence, number, batch, closed[0])


def _complete(evidence: Evidence, number: int, batch: BatchPlan, closed: Line) -> Iterator[str]:
    mine = [
        line for line in _outcomes(evidence) if line["number"] == number and line["id"].split(":")[0] == closed["batch"]
    ]
    times = Counter(line["index"] for line in mine)
    missing = [group for group in range(batch.groups) if not times[group]]
    if missing:
        yield f"batch {closed['batch']}: groups {missing} were never handed over"
    doubled = [group for group, count in times.items() if count > 1]
    if doubled and not evidence.trainer_crashed:
        yield f"batch {closed['batch']}: groups {doubled} were handed over more than once"
    counts = closed["counts"]
    if (
        counts["cancelled"]
        or counts["published"] != counts["completed"] + counts["failed"]
        or counts["published"] != batch.groups
    ):
        yield f"batch {closed['batch']}: the books say {counts}"


def _outcomes(evidence: Evidence) -> list[Line]:
    return [line for line in evidence.journal if line["kind"] in ("group", "failure")]


def _groups(evidence: Evidence) -> Iterator[str]:
    first: dict[str, Line] = {}
    for line in _outcomes(evidence):
        batch = evidence.plan.batches[int(line["number"])]
        rows = batch.rows[line["index"] * batch.size : (line["index"] + 1) * batch.size]
        if line["kind"] == "failure":
            # On a busy machine a trainer may come back too late; then it is told so, and that is what was promised.
            away = evidence.trainer_crashed or evidence.plan.fault in CAN_CUT_TRAINER_OFF
            late = away and "AbandonedError" in line["why"]
            if rows[0]["trouble"] not in DOOMED and not evidence.data_lost and not late:
                yield f"group {line['id']} failed without a reason of its own: {line['why']}"
            continue
        yield from _results(evidence, line, rows)
        before = first.setdefault(line["id"], line)
        if before["results"] != line["results"] and not evidence.data_lost:
            yield f"group {line['id']} came twice with different results"


def _rows(evidence: Evidence) -> Iterator[str]:
    """Single rows, where those were asked for: each once in a trainer's life, and as its group has it in the end."""
    rows = [line for line in evidence.journal if line["kind"] == "row"]
    times = Counter((line["batch"], line["row"]) for line in rows)
    doubled = [row for row, count in times.items() if count > 1]
    if doubled and not evidence.trainer_crashed:
        yield f"rows {doubled[:5]} were handed over more than once"
    groups = {line["id"]: line["results"] for line in evidence.journal if line["kind"] == "group"}
    for line in rows:
        size = evidence.plan.batches[int(line["number"])].size
        whole = groups.get(f"{line['batch']}:{line['row'] // size}")
        if whole is not None and whole[line["row"] % size] != line["result"] and not evidence.data_lost:
            yield f"row {line['row']} of batch {line['batch']} is another one in its group"


def _results(evidence: Evidence, line: Line, rows: Sequence[Line]) -> Iterator[str]:
    first = line["index"] * len(rows)
    shard = evidence.plan.shard(rows[0]["agent_ref"]["name"])
    if rows[0]["trouble"] in DOOMED:
        yield f"group {line['id']} has results although every attempt fails"
    by_row = line["origins"] is None
    origins = [[result["label"], result["attempt"]] for result in line["results"]] if by_row else line["origins"]
    for at, (row, result, origin) in enumerate(zip(rows, line["results"], origins, strict=True)):
        if (result["row"], result["key"]) != (first + at, row["key"]):
            yield f"group {line['id']} row {first + at} holds the result of row {result['row']} ({result['key']})"
        if [result["label"], result["attempt"]] != list(origin):
            yield f"group {line['id']} row {first + at} came from {result}, and is said to be of {origin}"
    # Rows that were handed out one by one before a broker lost them are not taken back.
    may_mix = shard.commit != "group" or (by_row and evidence.data_lost)
    if not may_mix and len({tuple(result[name] for name in IDENTITY) for result in line["results"]}) != 1:
        yield f"group {line['id']} mixes attempts: {line['results']}"


def _events(evidence: Evidence) -> Iterator[str]:
    """By the broker's own account: no row accepted twice, no group published or ended twice, or finished by halves."""
    sizes = {
        line["batch"]: evidence.plan.batches[int(line["number"])].size
        for line in evidence.journal
        if line["kind"] == "batch"
    }
    accepted: Counter[tuple[str, int]] = Counter()
    ends: Counter[str] = Counter()
    published: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for event in evidence.events:
        group = f"{event['batch']}:{event['group']}"
        if event["kind"] in ("accepted", "finished"):
            positions = _positions(event["detail"], sizes.get(event["batch"], 0))
            accepted.update((group, at) for at in positions)
            rows[group] += len(positions)
        ends[group] += event["kind"] in ("finished", "dead")
        published[group] += event["kind"] == "published"
        if event["kind"] == "finished" and rows[group] != sizes.get(event["batch"], 0):
            yield f"group {group} was finished with {rows[group]} rows"
    for name, counter in (("accepted", accepted), ("ended", ends), ("published", published)):
        twice = sorted(str(what) for what, count in counter.items() if count > 1)
        if twice:
            yield f"{name} more than once: {', '.join(twice[:5])}"


def _positions(detail: str, size: int) -> Sequence[int]:
    """None where the trainer had all rows before the worker said that it was done: those were accepted before."""
    return range(size) if detail == "all" else [int(at) for at in detail.split(",") if at.isdigit()]


def _keys(evidence: Evidence) -> Iterator[str]:
    """After the end only the run's own two hashes, the capped records, and empty queues that expire by themselves."""
    for key, (kind, ttl_ms, length) in evidence.keys.items():
        name = key.split(":", 2)[2]
        if name in ("routes", "shards", "events", "dead"):
            continue
        if name.startswith("groups:") and ttl_ms > 0 and length == 0:
            continue
        # What a crash or lost data left behind may not be removed by anybody, but it must end.
        if ttl_ms > 0 and (
            evidence.trainer_gone
            or evidence.data_lost
            or (evidence.trainer_crashed and name.startswith(("batch:", "accepted:")))
        ):
            continue
        yield f"key {key} was left behind ({kind}, {length} entries, TTL {ttl_ms} ms)"

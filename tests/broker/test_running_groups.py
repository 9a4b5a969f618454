"""Which group of a shard has run for longest, told from batches' hashes alone."""

from __future__ import annotations

from rolloutbus.broker.running_groups import Hosting, longest_running

NOW_S = 10_000.0
HOSTING = Hosting({"math/0": "math", "math/1": "math"}, {"math": 3600.0, "words": None})


def record(status: str, first_take_s: float, instance: str = "math/0", attempt: int = 1, accepted: int = 0) -> str:
    return f"{status} {attempt} token {instance} 1-0 0 0 {accepted} 9 {first_take_s * 1000:.0f}"


def batch(state: str = "sealed", **groups: str) -> dict[str, str]:
    return {"state": state, "group_size": "8", **{name.replace("_", ":"): value for name, value in groups.items()}}


def test_the_group_that_was_taken_first_is_found_over_all_batches() -> None:
    batches = {
        "b1": batch(g_0=record("running", 9_000), g_1=record("running", 8_000, "math/1", attempt=2, accepted=3)),
        "b2": batch(g_0=record("running", 8_500)),
    }
    found = longest_running(batches, HOSTING, NOW_S)
    assert set(found) == {"math"}
    group = found["math"]
    assert (group.batch, group.group, group.instance, group.attempt) == ("b1", 1, "math/1", 2)
    assert (group.accepted_rows, group.rows, group.first_take_ms) == (3, 8, 8_000_000)
    assert (group.running_s, group.deadline_s, group.instance_alive) == (2_000.0, 1_600.0, True)


def test_each_shard_has_its_own_also_where_its_instance_is_gone() -> None:
    batches = {"b": batch(g_0=record("running", 9_000), g_1=record("running", 9_500, "words/4"))}
    found = longest_running(batches, HOSTING, NOW_S)
    assert {shard: group.group for shard, group in found.items()} == {"math": 0, "words": 1}
    assert not found["words"].instance_alive
    assert found["words"].deadline_s is None


def test_a_deadline_that_has_passed_is_below_zero() -> None:
    found = longest_running({"b": batch(g_0=record("running", 6_000))}, HOSTING, NOW_S)
    assert found["math"].deadline_s == -400.0


def test_what_does_not_run_is_not_shown() -> None:
    """A cancelled batch keeps its records as they were."""
    ended = batch(g_0=record("done", 1_000), g_1=record("delayed", 1_000), g_2=record("queued", 0, "-", attempt=0))
    cancelled = batch("closed", g_0=record("running", 1_000))
    assert longest_running({"ended": ended, "cancelled": cancelled}, HOSTING, NOW_S) == {}


def test_records_of_strangers_hide_no_others() -> None:
    fields = batch(g_0="running into trouble", g_x=record("running", 1_000), g_2=record("running", 9_000))
    found = longest_running({"b": {**fields, "group_size": "many"}}, HOSTING, NOW_S)
    assert (found["math"].group, found["math"].rows) == (2, 0)

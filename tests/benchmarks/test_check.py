from __future__ import annotations

import pytest

from benchmarks.check import FLOORS, ROWS, verdicts
from benchmarks.payloads import COMPARED
from tests.benchmarks.samples import compared

HELD = {"1.5 KB": compared(unix=10_000.0)}


def test_a_ratio_on_its_floor_passes() -> None:
    (verdict,) = verdicts(HELD, {"1.5 KB": 10.0})
    assert verdict.passed
    assert str(verdict) == "ok    1.5 KB: 10.0 x Ray, floor 10.0 x"


def test_a_ratio_under_its_floor_fails_and_says_which_and_what_to_do() -> None:
    (verdict,) = verdicts(HELD, {"1.5 KB": 10.1})
    assert not verdict.passed
    assert "1.5 KB: 10.0 x Ray, floor 10.1 x" in str(verdict)
    assert "python -m benchmarks compare --peers ray,unix --kinds '1.5 KB'" in str(verdict)


def test_a_slower_machine_changes_no_verdict() -> None:
    slow = {"1.5 KB": compared(ray=10.0, unix=100.0)}
    assert verdicts(slow, {"1.5 KB": 10.0})[0].passed


def test_one_bad_repeat_changes_no_verdict() -> None:
    found = compared(unix=10_000.0)
    found.batches["unix"][0].rows_per_s = 1.0
    assert verdicts({"1.5 KB": found}, {"1.5 KB": 10.0})[0].passed


@pytest.mark.parametrize("kind", FLOORS)
def test_every_floor_has_a_payload_and_a_number_of_rows(kind: str) -> None:
    assert kind in COMPARED
    assert ROWS[kind] % 32 == 0

"""Results in a file: whose an error is that comes while it is open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rolloutbus.broker.errors import BrokerTimeoutError, BrokerUnavailableError, NoInstanceError
from rolloutbus.trainer.cli.guard import FAILED, exit_code
from rolloutbus.trainer.cli.results_file import STANDARD, ResultsError, opened

FULL = Path("/dev/full")


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnavailableError("away"),
        BrokerTimeoutError("no answer"),
        NoInstanceError("nobody"),
        ConnectionResetError("by somebody else"),
    ],
)
def test_errors_of_the_batch_pass_although_they_are_oserrors(error: OSError, tmp_path: Path) -> None:
    """The broker's absence was told as `cannot write v.out`, and as a mistake in the command."""

    def fails_meanwhile() -> None:
        with opened(str(tmp_path / "o.jsonl")) as write:
            write(["{}"])
            raise error

    with pytest.raises(type(error)) as raised:
        fails_meanwhile()
    assert raised.value is error
    assert (tmp_path / "o.jsonl").read_text() == "{}\n"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_failure_and_no_mistake() -> None:
    with (
        pytest.raises(ResultsError, match="cannot write /dev/full: No space left on device") as raised,
        opened(str(FULL)) as write,
    ):
        write(["{}"])
    assert exit_code(raised.value) == FAILED


def test_a_file_that_cannot_be_opened_any_more_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="No such file or directory"), opened(str(tmp_path / "gone" / "o.jsonl")):
        pass


def test_standard_output_is_written_and_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    with opened(STANDARD) as write:
        write(["1", "2"])
    print("3")
    assert capsys.readouterr().out.split(os.linesep)[:3] == ["1", "2", "3"]

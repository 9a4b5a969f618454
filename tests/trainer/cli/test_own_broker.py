"""What becomes of batches when a command and the broker that it started end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from rolloutbus.broker.errors import BatchCancelledError
from rolloutbus.trainer.cli import own_broker
from rolloutbus.trainer.cli.own_broker import batches_end_with_it

from .conftest import RUN, Stage, comes_true, rows_of, take


def test_clients_of_open_batches_are_told_before_the_broker_ends(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """They waited up to five minutes for a broker that never came again."""
    batch = stage.batch(rows_of("ok", "ok", "ok"))
    comes_true(lambda: stage.status(batch, 2) == "queued")
    with pytest.raises(KeyboardInterrupt), batches_end_with_it(stage.url, RUN):
        raise KeyboardInterrupt
    with pytest.raises(BatchCancelledError, match="`rolloutbus up` ended, and its own broker with it"):
        take(batch, 1)
    assert "1 open batch cancelled, clients told" in " ".join(capsys.readouterr().err.split())


def test_there_is_no_waiting_for_clients_that_have_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_broker, "_PATIENCE_S", 1e6)
    batch = stage.batch(rows_of("ok"))
    comes_true(lambda: stage.status(batch, 0) == "queued")
    with batches_end_with_it(stage.url, RUN):
        asyncio.run(batch.aclose())
    assert "cancelled" not in capsys.readouterr().err


def test_the_broker_ends_as_soon_as_the_clients_have_closed_their_batches(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_broker, "_PATIENCE_S", 1e6)
    batch = stage.batch(rows_of("ok"))
    comes_true(lambda: stage.status(batch, 0) == "queued")
    with ThreadPoolExecutor() as trainer, batches_end_with_it(stage.url, RUN):
        taken = trainer.submit(take, batch, 1)
    assert isinstance(taken.exception(), BatchCancelledError)
    assert not stage.redis.exists(stage.keys.batch(batch.id))


def test_a_broker_that_has_gone_first_is_told_and_hides_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="first"), batches_end_with_it("redis://127.0.0.1:1/0", RUN):
        raise ValueError("first")
    assert "cannot tell clients of the broker's end" in " ".join(capsys.readouterr().err.split())

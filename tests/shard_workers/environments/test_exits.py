"""Foreign code that wants to end its process."""

from __future__ import annotations

import asyncio

import pytest
from rolloutbus.broker.errors import EnvironmentContractError
from rolloutbus.shard_workers.environments.exits import EXITS, contained, text_of


class Rude(SystemExit):
    """An exit whose message is an exit."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


@pytest.mark.parametrize("kind", EXITS)
async def test_outside_of_the_main_thread_an_exit_becomes_an_error(kind: type[BaseException]) -> None:
    error = await asyncio.to_thread(contained, kind("no more"), "the rollout")
    assert isinstance(error, EnvironmentContractError)
    assert str(error) == f"the rollout raised {kind.__name__}(no more); let it raise an error"


def test_in_the_main_thread_an_interrupt_may_be_somebodys_and_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        contained(KeyboardInterrupt(), "the rollout")
    assert "SystemExit(3)" in str(contained(SystemExit(3), "the rollout"))


def test_a_message_that_cannot_be_read_is_told_as_such() -> None:
    assert text_of(Rude()) == "(its message cannot be read: KeyboardInterrupt)"
    assert "Rude((its message cannot be read" in str(contained(Rude(), "the rollout"))

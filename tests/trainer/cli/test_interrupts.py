"""Signals in the main thread, as the command line takes them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from rolloutbus.trainer.cli.interrupts import Interrupts


def start_of_ray(number: signal.Signals, steps: list[str]) -> None:
    """Takes the signal for itself, as Ray does while it starts, and is interrupted then."""
    with Interrupts() as interrupts, interrupts.held():
        signal.signal(number, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), number)
        steps.append("came to its end")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_code_that_is_held_comes_to_its_end_and_cannot_take_the_signals(number: signal.Signals) -> None:
    genuine, steps = signal.signal, list[str]()
    with pytest.raises(KeyboardInterrupt) as raised:
        start_of_ray(number, steps)
    assert steps == ["came to its end"]
    assert raised.value.args == (128 + number,)
    assert signal.signal is genuine


def test_what_fails_because_of_the_signal_ends_as_interrupted() -> None:
    def fails() -> None:
        with Interrupts() as interrupts, interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ConnectionError("a part of it has ended")

    with pytest.raises(KeyboardInterrupt) as raised:
        fails()
    assert raised.value.args == (143,)


def test_other_signals_are_left_to_held_code() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Interrupts() as interrupts, interrupts.held():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR1, before) is signal.SIG_IGN


def test_held_code_may_set_handlers_by_keyword() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Interrupts() as interrupts, interrupts.held():
        ours = signal.getsignal(signal.SIGINT)
        assert signal.signal(signalnum=signal.SIGINT, handler=signal.SIG_IGN) == ours
        signal.signal(signalnum=signal.SIGUSR1, handler=signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR1, before) is signal.SIG_IGN


def test_outside_the_main_thread_nothing_is_patched() -> None:
    """Of two threads the one that ended last put the other's patch back, for good."""

    def hold() -> object:
        with Interrupts() as interrupts, interrupts.held():
            return signal.signal

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(hold).result(10) is signal.signal


async def cancels_itself(number: signal.Signals | None) -> None:
    if number is not None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()
    raise asyncio.CancelledError


def run(number: signal.Signals | None) -> None:
    with Interrupts() as interrupts:
        interrupts.run(lambda: cancels_itself(number))


def test_work_that_no_signal_cancelled_is_no_interrupt_with_code_0() -> None:
    """The command ended as if all were well, with its job unfinished."""
    with pytest.raises(asyncio.CancelledError):
        run(None)
    with pytest.raises(KeyboardInterrupt) as raised:
        run(signal.SIGTERM)
    assert raised.value.args == (143,)

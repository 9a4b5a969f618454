"""What went wrong, as plain data, and whether another place may do better."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker.errors import BrokerFullError, EnvironmentContractError
from rolloutbus.broker.messages import Failure
from rolloutbus.shard_workers.attempts import DeadlineExceededError
from rolloutbus.shard_workers.failures import describe, http_status, retry_delay
from rolloutbus.shard_workers.finishing import IncompleteGroupError
from rolloutbus.shard_workers.worker_settings import WorkerSettings


class StatusError(Exception):
    """As HTTP clients raise it, by the attributes that the test gives it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("refused")
        self.__dict__.update(attributes)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599, 408, 429])
def test_a_status_that_another_try_may_mend_is_infra(status: int) -> None:
    failure = describe(StatusError(status_code=status))
    assert (failure.failure_class, failure.http_status) == ("infra", status)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 499])
def test_any_other_status_is_data(status: int) -> None:
    failure = describe(StatusError(status=status))
    assert (failure.failure_class, failure.http_status) == ("data", status)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StatusError(status_code=503), 503),
        (StatusError(status=404), 404),
        (StatusError(code=429), 429),
        (StatusError(response=SimpleNamespace(status_code=502)), 502),
        (StatusError(status="503"), None),
        (StatusError(code=7), None),
        (StatusError(status=True), None),
        (ValueError("no status"), None),
    ],
)
def test_the_status_is_found_under_the_names_that_clients_give_it(error: Exception, status: int | None) -> None:
    assert http_status(error) == status


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("slow"),
        ConnectionResetError("gone"),
        asyncio.IncompleteReadError(b"", 1),
        BrokerFullError("OOM"),
        IncompleteGroupError("lost"),
        DeadlineExceededError("late"),
        type("APIConnectionError", (Exception,), {})("openai"),
        type("ConnectTimeout", (type("TransportError", (Exception,), {}),), {})("httpx"),
        type("ServerDisconnectedError", (type("ClientConnectionError", (Exception,), {}),), {})("aiohttp"),
        ExceptionGroup("both", [TimeoutError(), ExceptionGroup("inner", [StatusError(status=503)])]),
    ],
)
def test_what_another_place_may_do_better_is_infra(error: Exception) -> None:
    assert describe(error).failure_class == "infra"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("reward"),
        OSError("disk"),
        EnvironmentContractError("twice"),
        ExceptionGroup("mixed", [TimeoutError(), ValueError()]),
    ],
)
def test_all_else_is_data(error: Exception) -> None:
    assert describe(error).failure_class == "data"


def test_a_status_says_more_than_the_type() -> None:
    class Refused(StatusError, ConnectionError):
        pass

    assert describe(Refused(status_code=404)).failure_class == "data"


def test_a_failure_is_plain_data_with_type_message_and_traceback() -> None:
    def rollout() -> None:
        raise KeyError("reward")

    with pytest.raises(KeyError) as caught:
        rollout()
    failure = describe(caught.value)
    assert (failure.type, failure.message) == ("KeyError", "'reward'")
    assert "in rollout" in failure.traceback
    assert Failure.unpacked(failure.packed()) == failure
    assert pickle.loads(pickle.dumps(failure)) == failure


@pytest.mark.parametrize("body", [b"why \xff", "why"])
def test_what_the_server_answered_is_part_of_the_message(body: Any) -> None:
    assert "refused: why" in describe(StatusError(status=500, response_content=body)).message


def test_long_texts_are_cut_and_broken_ones_survive() -> None:
    failure = describe(ValueError("x" * 100_000 + "\ud800"))
    assert len(failure.message) <= 4_000
    assert len(failure.traceback) <= 16_000
    assert describe(ValueError("\ud800")).packed()


@pytest.mark.parametrize("raised", [RuntimeError("no"), SystemExit(3)], ids=repr)
def test_an_exception_that_cannot_even_be_printed_is_described(raised: BaseException) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise raised

        __repr__ = __str__

        @property
        def status_code(self) -> int:
            raise raised

        response = response_content = status_code

    failure = describe(Mute())
    assert (failure.type, failure.failure_class, failure.http_status) == ("Mute", "data", None)
    assert type(raised).__name__ in failure.message
    assert failure.packed()


def test_an_answer_that_cannot_be_printed_takes_nothing_with_it() -> None:
    class Answer:
        def __str__(self) -> str:
            raise SystemExit(3)

    assert (
        "refused: (its message cannot be read: SystemExit)"
        in describe(StatusError(status=500, response_content=Answer())).message
    )


@given(st.integers(0, 200))
def test_the_delay_doubles_with_jitter_up_to_a_cap(failures: int) -> None:
    settings = WorkerSettings(retry_backoff_s=1.0, retry_backoff_max_s=60.0)
    full = min(60.0, 2.0 ** max(0, failures - 1))
    assert full / 2 <= retry_delay(failures, settings) <= full


def test_two_instances_do_not_come_back_at_the_same_moment() -> None:
    settings = WorkerSettings(retry_backoff_s=10.0)
    assert len({retry_delay(1, settings) for _ in range(20)}) > 1


class _Unnamed(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__name__":
            raise RuntimeError("no name")
        return type.__getattribute__(cls, name)


class BodyError(Exception):
    """Looks what it is asked for up in a body that it has not."""

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["body"][name]


class UnnamedError(Exception, metaclass=_Unnamed):
    pass


class SilentError(Exception):
    def __str__(self) -> str:
        raise GeneratorExit


class ChildlessError(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> Any:
        raise ValueError("no children")


def nested(depth: int) -> Exception:
    error: Any = ValueError("the inmost")
    for _ in range(depth):
        error = ExceptionGroup("around", [error])
    return error


def oddly_placed() -> SyntaxError:
    """Printing it looks for the newlines of its text, which is none."""
    place: Any = ("f", 1, 1, b"text")
    return SyntaxError("odd", place)


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (BodyError("prompt is too long"), "BodyError", "prompt is too long"),
        (UnnamedError("no name"), "UnnamedError", "no name"),
        (SilentError(), "SilentError", "(its message cannot be read)"),
        (ChildlessError("group", [ValueError()]), "ChildlessError", "group (1 sub-exception)"),
        (nested(3000), "ExceptionGroup", "around (1 sub-exception)"),
        (oddly_placed(), "SyntaxError", "odd (f, line 1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_exception_that_cannot_be_looked_at_is_described_as_far_as_it_can(
    error: Exception, name: str, message: str
) -> None:
    """It ended its attempt without a word, and came after five leases as the death of an instance."""
    failure = describe(error)
    assert (failure.failure_class, failure.type, failure.message) == ("data", name, message)
    assert Failure.unpacked(failure.packed()) == failure

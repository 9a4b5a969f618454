"""What a Gym rollout fails with: plain exceptions that pickle, with class, HTTP status and response text.

On their way from Gym's process they are plain data, because Gym's own exceptions neither pickle nor are importable
everywhere.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from ....broker.errors import ConfigError, RolloutBusError
from ..exits import text_of

_TEXT_LIMIT = 16_000


class GymRolloutError(RolloutBusError, RuntimeError):
    """Gym's answer to one row was an error. `status_code` and `response_content` (text) are those of the HTTP answer,
    if there was one.
    """

    def __init__(self, message: str, status_code: int | None = None, response_content: str = "") -> None:
        super().__init__(message, status_code, response_content)
        self.status_code = status_code
        self.response_content = response_content

    def __str__(self) -> str:
        return str(self.args[0])


class GymConnectionError(RolloutBusError, ConnectionError):
    """A connection to one of Gym's servers broke."""


class GymStackError(RolloutBusError, ConnectionError):
    """A server of the stack, or the process that hosts it, is gone; nothing runs here until it is started again."""


class GymRowTimeoutError(RolloutBusError, TimeoutError):
    """One row ran longer than `rolloutbus_row_timeout_s`."""


class GymStartError(RolloutBusError, RuntimeError):
    """Gym's servers did not start."""


class GroupSizeError(ConfigError):
    """A verifier that compares siblings waits for another number of them than a group has."""


def pack_error(error: BaseException) -> dict[str, Any]:
    """`error` as plain data."""
    text: Any = getattr(error, "response_content", None)
    status: Any = getattr(error, "status", None)
    return {
        "kind": _kind(error, status),
        "message": f"{type(error).__name__}: {sendable_text(error)}"[:_TEXT_LIMIT],
        "status": status if isinstance(status, int) else None,
        "text": (text.decode(errors="replace") if isinstance(text, bytes) else sendable_text(text or ""))[:_TEXT_LIMIT],
        "trace": sendable_text("".join(traceback.format_exception(error))[-_TEXT_LIMIT:]),
    }


def sendable_text(value: object) -> str:
    """`str(value)`, whatever that does; lone surrogates, which a model may well write, become question marks."""
    return text_of(value).encode(errors="replace").decode()


def unpack_error(packed: dict[str, Any]) -> Exception:
    """The exception for what `pack_error` made; where it was raised travels as a note."""
    message: str = packed["message"]
    error = _make(packed, message)
    error.add_note(packed["trace"])
    return error


def _make(packed: dict[str, Any], message: str) -> Exception:
    match packed["kind"]:
        case "timeout":
            return GymRowTimeoutError(message)
        case "stack":
            return GymStackError(message)
        case "connection":
            return GymConnectionError(message)
        case _:
            return GymRolloutError(message, packed["status"], packed["text"])


def _kind(error: BaseException, status: object) -> str:
    if isinstance(error, GymStackError):
        return "stack"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return "timeout"
    names = {base.__name__ for base in type(error).__mro__}
    if status is None and (
        isinstance(error, ConnectionError) or names & {"ClientConnectionError", "ClientPayloadError"}
    ):
        return "connection"
    return "other"

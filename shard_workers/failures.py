"""What went wrong in an environment, as plain data, and whether another place may do better.

Timeouts, lost connections and HTTP 5xx, 408 and 429 are "infra": the same group may succeed elsewhere or later. All
else is "data".
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..broker.errors import BrokerFullError
from ..broker.messages import Failure
from .environments.exits import EXITS, text_of
from .worker_settings import WorkerSettings

Seen = TypeVar("Seen")

_INFRA_STATUS = {408, 429}
_TEXT_LIMIT = 4_000
_TRACE_LIMIT = 16_000


def http_status(error: BaseException) -> int | None:
    """The HTTP status an exception carries, by the names that HTTP clients give it."""
    for source in (error, _attribute(error, "response")):
        for name in ("status_code", "status", "code"):
            status = _attribute(source, name)
            if isinstance(status, int) and 100 <= status <= 599:
                return int(status)
    return None


def describe(error: BaseException) -> Failure:
    """`error` as a `Failure`; instance and attempt are filled in where it is reported.

    Never raises: what somebody else's exception does while it is looked at must not look like its instance's death.
    """
    status = _seen(lambda: http_status(error), None)
    return Failure(
        failure_class="infra" if _seen(lambda: _is_infra(error, status), False) else "data",
        type=_name_of(error),
        message=_seen(lambda: _message(error), "(its message cannot be read)"),
        traceback=_seen(lambda: _traceback(error), ""),
        http_status=status,
    )


def _seen(look: Callable[[], Seen], otherwise: Seen) -> Seen:
    """What a look at foreign code gives, `otherwise` where it raises, whatever it raises."""
    try:
        return look()
    except BaseException:
        return otherwise


def _message(error: BaseException) -> str:
    text = text_of(error)
    body = _attribute(error, "response_content")
    if body is not None:
        text += f": {body.decode(errors='replace') if isinstance(body, bytes) else text_of(body)}"
    return text[:_TEXT_LIMIT].encode(errors="replace").decode()


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-_TRACE_LIMIT:].encode(errors="replace").decode()


def _name_of(error: BaseException) -> str:
    """Its type's own name, whatever a metaclass says."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def _attribute(source: object, name: str) -> Any:
    """None where there is none, or where it is computed and that fails."""
    try:
        return getattr(source, name, None)
    except (Exception, *EXITS):
        return None


def _is_infra(error: BaseException, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in _INFRA_STATUS
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return all(_is_infra(one, http_status(one)) for one in inner)
    if isinstance(error, (TimeoutError, ConnectionError, asyncio.IncompleteReadError, BrokerFullError)):
        return True
    # HTTP clients have their own families for these and no common base class.
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & {"APIConnectionError", "TransportError", "ClientConnectionError", "ServerTimeoutError"})


def retry_delay(failures: int, settings: WorkerSettings) -> float:
    """Seconds until the next attempt after `failures` failed ones: doubling, with jitter, capped."""
    full = min(settings.retry_backoff_max_s, settings.retry_backoff_s * 2 ** max(0, failures - 1))
    return full * random.uniform(0.5, 1.0)

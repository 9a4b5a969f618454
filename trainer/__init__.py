"""What a trainer imports: the client, what it gives, and the errors to catch; all others are in `broker.errors`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..broker.errors import (
        BatchCancelledError,
        BrokerTimeoutError,
        BrokerUnavailableError,
        GroupFailedError,
        NoInstanceError,
        RolloutBusError,
        RouteError,
        RowError,
        UnknownBatchError,
    )
    from ..collector import CompletedGroup, GroupFailure, Origin
    from .batch import Batch
    from .client import RolloutClient
    from .nemo_rl import NemoRLEnvironment
    from .session import BatchCounts

__all__ = [
    "Batch",
    "BatchCancelledError",
    "BatchCounts",
    "BrokerTimeoutError",
    "BrokerUnavailableError",
    "CompletedGroup",
    "GroupFailedError",
    "GroupFailure",
    "NemoRLEnvironment",
    "NoInstanceError",
    "Origin",
    "RolloutBusError",
    "RolloutClient",
    "RouteError",
    "RowError",
    "UnknownBatchError",
]

_ERRORS = "..broker.errors"
_HOME = {
    "Batch": ".batch",
    "BatchCounts": ".session",
    "CompletedGroup": "..collector",
    "GroupFailure": "..collector",
    "NemoRLEnvironment": ".nemo_rl",
    "Origin": "..collector",
    "RolloutClient": ".client",
}


def __getattr__(name: str) -> Any:
    """Its names, looked up when they are first used: the command line has to say something before all is imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME.get(name, _ERRORS), __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

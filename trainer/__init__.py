"""What a trainer imports: the client, and what it gives."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..collector import CompletedGroup, GroupFailure, Origin
    from .batch import Batch
    from .client import RolloutClient
    from .nemo_rl import NemoRLEnvironment
    from .session import BatchCounts

_HOME = {
    "Batch": ".batch",
    "BatchCounts": ".session",
    "CompletedGroup": "..collector",
    "GroupFailure": "..collector",
    "NemoRLEnvironment": ".nemo_rl",
    "Origin": "..collector",
    "RolloutClient": ".client",
}

__all__ = ["Batch", "BatchCounts", "CompletedGroup", "GroupFailure", "NemoRLEnvironment", "Origin", "RolloutClient"]


def __getattr__(name: str) -> Any:
    """Its names, looked up when they are first used: the command line has to say something before all is imported."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

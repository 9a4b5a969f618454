"""The route of a row: the one name that decides which shard runs it.

The rule is NeMo Gym's: `agent_ref.name` where it is given, else `task_source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from .errors import RouteError, RowTypeError


def route_of(row: Mapping[str, Any]) -> str:
    """Return `row["agent_ref"]["name"]`, else `row["task_source"]`, whichever is the first non-empty string.

    Raises `RouteError` if the row has neither, and `RowTypeError` if it is no mapping. The caller knows
    where the row stands, so it adds the row's number.
    """
    if not _is_mapping(row):
        raise RowTypeError(f"a row must be a dict, but is {_shown(row)}")
    agent_ref: object = row.get("agent_ref")
    name = agent_ref.get("name") if _is_mapping(agent_ref) else None
    for route in (name, row.get("task_source")):
        if isinstance(route, str) and route:
            return route
    raise RouteError(
        f"the row has no route: {_missing(row, 'agent_ref')} and {_missing(row, 'task_source')}; give it "
        "`agent_ref: {name: ENTRY}` or `task_source: ENTRY`, where ENTRY is an agent or a resources server"
    )


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    # To ask an abstract class takes ten times as long, and each group's route is looked up before the first is sent.
    return type(value) is dict or isinstance(value, Mapping)


def _missing(row: Mapping[str, Any], key: str) -> str:
    return f"`{key}` is {_shown(row[key])}" if key in row else f"`{key}` is absent"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

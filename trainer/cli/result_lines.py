"""Finished groups as JSON lines, one per row. Whatever an environment returned, a line is valid JSON.

Arrays and tensors become lists, bytes become base64 text, and the three floats that JSON lacks become the strings
"NaN", "Infinity" and "-Infinity", which lose nothing and which `float()` reads back. A failed row has `failure` in
place of a result, and no reward.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ...collector import CompletedGroup, GroupFailure

_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def completed_lines(group: CompletedGroup, **marks: Any) -> Iterator[str]:
    """One line per row of the group, in input order; `marks` begin each."""
    for row, result, origin in zip(group.rows, group.results, group.origins, strict=True):
        yield to_json(
            {
                **marks,
                **_identity(row),
                "reward": reward_of(result),
                "instance": origin.instance,
                "attempt": origin.attempt,
                "result": result,
            }
        )


def failed_lines(failure: GroupFailure, rows: Sequence[Mapping[str, Any]], **marks: Any) -> Iterator[str]:
    """One line per row of the failed group; `rows` are the batch's."""
    why = {
        "class": failure.failure_class, "type": failure.type, "message": failure.message,
        "http_status": failure.http_status, "traceback": failure.traceback,
    }  # fmt: skip
    for index in failure.row_indices:
        ends = {
            "reward": None,
            "instance": failure.instance,
            "attempt": failure.attempt,
            "result": None,
            "failure": why,
        }
        yield to_json({**marks, **_identity(rows[index]), **ends})


def reward_of(result: Any) -> float | None:
    """The result's `reward`, or that of its `full_result` (NeMo RL's shape); None where there is none."""
    if not isinstance(result, Mapping):
        return None
    fields = cast("Mapping[str, Any]", result)
    if "reward" not in fields:
        return reward_of(fields.get("full_result"))
    value: object = _unwrapped(fields["reward"])
    return float(value) if isinstance(value, int | float) else None


def to_json(value: Mapping[str, Any]) -> str:
    """One line of valid JSON."""
    try:
        return _dump(plain(value))
    except RecursionError:
        return _dump(plain({**value, "result": "(nested too deeply for JSON)"}))


def plain(value: Any) -> Any:
    """`value` as JSON knows it."""
    value = _unwrapped(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE[repr(value)]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(cast("bytes", value))).decode()
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return str(value)


def _identity(row: Mapping[str, Any]) -> dict[str, Any]:
    """Which row it was; a row that routes by `task_source` shows that."""
    named = {key: row[key] for key in ("agent_ref", "task_source") if key in row}
    return {"_rowidx": row.get("_rowidx"), **({"agent_ref": None} | named)}


def _unwrapped(value: Any) -> Any:
    """Arrays, tensors and their scalars as lists and numbers; neither numpy nor torch is imported for it."""
    if isinstance(value, memoryview) or not hasattr(value, "tolist"):
        return cast(Any, value)
    return value.tolist()


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(plain(key))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

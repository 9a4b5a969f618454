"""Whose sibling a rollout is, as Gym's verifiers see it. Pure.

A verifier that scores siblings against each other keys its waiting room by these fields, so no other batch, group or
attempt may ever say the same. What the caller had in them is put back into the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
GROUP_ID = "_ng_group_id"
GROUP_ATTEMPT = "_ng_group_attempt"
FIELDS = (TASK_INDEX, ROLLOUT_INDEX, GROUP_ID, GROUP_ATTEMPT)
WORKER_GROUP_ID = "_group_id"
# JSON numbers beyond this are not exact everywhere.
_TASK_BITS = 53


def stamped(rows: Sequence[Mapping[str, Any]], call: int) -> list[dict[str, Any]]:
    """Copies of one group's rows with the identity of this attempt; `call` grows with every call of one stack.

    `call` makes the identity new even where a broker that lost its last second counts an attempt twice.
    """
    whole = str(rows[0].get(WORKER_GROUP_ID, ""))
    group = whole.rpartition(":")[0] or f"call:{call}"
    digest = hashlib.blake2b(f"{whole}/{call}".encode(), digest_size=8).digest()
    task = int.from_bytes(digest) >> (64 - _TASK_BITS)
    return [
        {
            **{key: value for key, value in row.items() if key != WORKER_GROUP_ID},
            TASK_INDEX: task,
            ROLLOUT_INDEX: at,
            GROUP_ID: group,
            GROUP_ATTEMPT: call,
        }
        for at, row in enumerate(rows)
    ]


def restore(result: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Put the caller's own values back, in place, where Gym echoed ours; what the caller did not have goes."""
    for name in FIELDS:
        if name in result:
            if name in row:
                result[name] = row[name]
            else:
                del result[name]
    return result

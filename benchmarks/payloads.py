"""Rows and results of the benchmark, the same for every contestant."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

GROUP_SIZE = 8
SHARED_PROMPT_SIBLINGS = 16
Result = dict[str, Any]


def _small(index: int) -> Result:
    return {"row": index, "reward": 1.0, "text": "x" * 1500}


def _tiny(index: int) -> Result:
    return {"row": index, "reward": 1.0}


def _numpy(tokens: int) -> Callable[[int], Result]:
    def make(index: int) -> Result:
        ids = np.arange(tokens, dtype=np.int32)
        return {"row": index, "reward": 1.0, "token_ids": ids, "logprobs": np.ones(tokens, dtype=np.float32)}

    return make


def _lists(index: int) -> Result:
    return {
        "row": index,
        "reward": 1.0,
        "token_ids": list(range(4096)),
        "logprobs": [-0.123456 * at for at in range(4096)],
    }


# Kind → (how to make a result, rows per run at full size); "tiny" is for what is counted and not for what is carried.
KINDS: dict[str, tuple[Callable[[int], Result], int]] = {
    "1.5 KB": (_small, 16_384),
    "64 KB numpy": (_numpy(8_192), 4_096),
    "token lists": (_lists, 2_048),
    "1 MB numpy": (_numpy(131_072), 512),
    "shared 2 MB prompt": (_small, 512),
    "tiny": (_tiny, 16_384),
}
COMPARED = tuple(kind for kind in KINDS if kind != "tiny")


def make_rows(kind: str, count: int, shards: int) -> list[dict[str, Any]]:
    """`count` rows in groups, groups dealt to `shards` routes in turn."""
    size = group_size(kind)
    prompt = "y" * (2 << 20) if kind.startswith("shared") else "y" * 1000
    rows: list[dict[str, Any]] = []
    for index in range(count):
        if kind.startswith("shared") and index % size == 0:
            prompt = str(index) + prompt[len(str(index)) :]
        route = f"route{(index // size) % shards}"
        params = {"input": prompt}
        rows.append({"_rowidx": index, "kind": kind, "agent_ref": {"name": route}, "responses_create_params": params})
    return rows


def make_result(row: dict[str, Any]) -> Result:
    """The result of a row, stamped with the moment it was done."""
    result = KINDS[row["kind"]][0](row["_rowidx"])
    result["done"] = time.time()
    return result


def group_size(kind: str) -> int:
    return SHARED_PROMPT_SIBLINGS if kind.startswith("shared") else GROUP_SIZE

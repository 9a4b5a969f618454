"""Three little environments with verifiers, each an async function of a row and its context.

They ask the policy for one answer per rollout, score it, and give the score back with the response and what
the verifier saw. The rollouts of one prompt differ by their seed, which is the row's place in the batch.
`brevity` scores an answer against its siblings, so it waits for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from rolloutbus.shard_workers.environments import RolloutContext

Row: TypeAlias = dict[str, Any]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


async def arithmetic(row: Row, context: RolloutContext) -> dict[str, Any]:
    """Reward 1 where the number after "Answer:" is the expected one, within the option `tolerance`."""
    text = await _ask(row, context)
    found = last_number(text)
    expected = float(row["expected_answer"])
    correct = found is not None and abs(found - expected) <= float(context.options.get("tolerance", 1e-6))
    return {"reward": float(correct), "response": _response(text), "correct": correct, "found": found}


async def sort_words(row: Row, context: RolloutContext) -> dict[str, Any]:
    """Reward is the share of neighbouring pairs that stand as expected, and nothing for lost or invented
    words.
    """
    text = await _ask(row, context)
    found = re.findall(r"[a-z]+", text.lower())
    expected = [str(word) for word in row["expected_words"]]
    complete = sorted(found) == sorted(expected)
    reward = pair_order(found, expected) if complete else 0.0
    return {"reward": reward, "response": _response(text), "correct": found == expected, "complete": complete}


async def brevity(row: Row, context: RolloutContext) -> dict[str, Any]:
    """Ranks the siblings' valid sentences by length: 1 for the shortest, less for each shorter sibling, 0
    if not valid.
    """
    text = await _ask(row, context)
    valid = is_valid_sentence(text, row["required_words"], int(context.options.get("max_words", 30)))
    length = len(text.split()) if valid else None
    lengths: list[int | None] = await context.group.gather(length)
    return {
        "reward": rank_reward(length, lengths),
        "response": _response(text),
        "correct": valid,
        "words": len(text.split()),
        "valid_siblings": sum(other is not None for other in lengths),
    }


def last_number(text: str) -> float | None:
    """The number after the last "Answer:", or the last number of a text without one."""
    numbers = _NUMBER.findall(text.rpartition("Answer:")[2])
    return float(numbers[-1]) if numbers else None


def pair_order(found: Sequence[str], expected: Sequence[str]) -> float:
    """The share of neighbours in `found` in the order of `expected`, which holds the same words."""
    if len(expected) < 2:
        return 1.0
    place = {word: position for position, word in enumerate(expected)}
    ordered = [place[left] < place[right] for left, right in pairwise(found)]
    return sum(ordered) / len(ordered)


def is_valid_sentence(text: str, required_words: Sequence[str], max_words: int) -> bool:
    """One sentence, not too long, with every required word in it."""
    words = set(re.findall(r"[a-z]+", text.lower()))
    one_sentence = bool(re.fullmatch(r"[^.!?]+[.!?]", text.strip()))
    return one_sentence and len(text.split()) <= max_words and words.issuperset(required_words)


def rank_reward(length: int | None, lengths: Sequence[int | None]) -> float:
    """The share of valid siblings (oneself included) that are not shorter."""
    valid = [other for other in lengths if other is not None]
    if length is None:
        return 0.0
    return sum(other >= length for other in valid) / len(valid)


async def _ask(row: Row, context: RolloutContext) -> str:
    params = row["responses_create_params"]
    messages = [{"role": message["role"], "content": message["content"]} for message in params["input"]]
    return await context.policy.complete(
        messages,
        seed=row["_rowidx"],
        temperature=params.get("temperature", 1.0),
        max_tokens=params.get("max_output_tokens"),
    )


def _response(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"output": [{"type": "message", "role": "assistant", "content": content}]}

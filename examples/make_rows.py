"""Writes rows.jsonl, the prompts of the quickstart: always the same ones, the routes taking turns.

Run from the repository's top folder: python examples/make_rows.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]

PROMPTS = 64
SEED = 20

_NAMES = ("Mia", "Noor", "Tomas", "Ines", "Kofi", "Lena")
_THINGS = ("apples", "marbles", "stamps", "postcards", "shells", "pencils")
_WORDS = (
    *("anchor", "basket", "candle", "desert", "engine", "falcon", "garden", "hammer", "island", "jacket"),
    *("kettle", "ladder", "meadow", "needle", "orchard", "pillow", "quarry", "ribbon", "saddle", "tunnel"),
)


def rows() -> list[Row]:
    """All prompts of the quickstart, one row each."""
    dice = random.Random(SEED)
    makers = cycle([_arithmetic_row, _sorting_row, _brevity_row])
    return [make(dice) for make in islice(makers, PROMPTS)]


def _row(route: str, system: str, user: str, **verifier: Any) -> Row:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"responses_create_params": {"input": messages}, "agent_ref": {"name": route}, **verifier}


def _arithmetic_row(dice: random.Random) -> Row:
    make: Callable[[random.Random], tuple[str, int]] = dice.choice([_trade, _bakery, _sharing, _tickets, _train])
    problem, answer = make(dice)
    system = "Solve the problem step by step and end with 'Answer: ' and the number."
    return _row("arithmetic", system, problem, expected_answer=answer)


def _trade(dice: random.Random) -> tuple[str, int]:
    has, buys, gives = dice.randint(10, 60), dice.randint(5, 40), dice.randint(2, 9)
    name, things = dice.choice(_NAMES), dice.choice(_THINGS)
    text = (
        f"{name} has {has} {things}. {name} buys {buys} more and gives {gives} to a friend. "
        f"How many {things} does {name} have now?"
    )
    return text, has + buys - gives


def _bakery(dice: random.Random) -> tuple[str, int]:
    trays, rolls, sold = dice.randint(3, 9), dice.randint(8, 15), dice.randint(4, 20)
    text = f"A baker fills {trays} trays with {rolls} rolls each and sells {sold} rolls. "
    return text + "How many rolls are left?", trays * rolls - sold


def _sharing(dice: random.Random) -> tuple[str, int]:
    children, share, things = dice.randint(3, 9), dice.randint(4, 15), dice.choice(_THINGS)
    text = f"{children * share} {things} are shared out, divided equally among {children} children. "
    return text + f"How many {things} does each child get?", share


def _tickets(dice: random.Random) -> tuple[str, int]:
    price, tickets = dice.randint(4, 19), dice.randint(3, 12)
    return f"A ticket costs {price} dollars. How much do {tickets} tickets cost?", price * tickets


def _train(dice: random.Random) -> tuple[str, int]:
    rides, leave, enter = dice.randint(80, 240), dice.randint(10, 60), dice.randint(10, 60)
    text = f"A train carries {rides} people. At the next stop {leave} get off and {enter} get on. "
    return text + "How many people are on the train?", rides - leave + enter


def _sorting_row(dice: random.Random) -> Row:
    words = dice.sample(_WORDS, dice.randint(5, 8))
    backwards = dice.random() < 0.3
    order = "in reverse alphabetical order" if backwards else "in alphabetical order"
    return _row(
        "sort_words",
        "Reply with the words only, separated by commas.",
        f"Sort these words {order}: {', '.join(words)}",
        expected_words=sorted(words, reverse=backwards),
    )


def _brevity_row(dice: random.Random) -> Row:
    words = dice.sample(_WORDS, 3)
    system = "Reply with one sentence and nothing else. The shorter, the better."
    return _row("brevity", system, f"Write a sentence with these words: {', '.join(words)}", required_words=words)


def main() -> None:
    """Write the file beside this program."""
    lines = [json.dumps(row) + "\n" for row in rows()]
    Path(__file__).with_name("rows.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()

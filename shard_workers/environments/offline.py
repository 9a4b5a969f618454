"""A small solver in the place of a model: it reads the prompt, and is wrong now and then, as a model under
training is.

Promises the same answer for the same prompt and seed on every machine, and mistakes of the kind a model
makes: a step forgotten, a sign turned, a slip in the last digit, two words out of order, a word left out.
It understands arithmetic word problems, sorting words, and sentences that must contain given words; to
anything else it says that it does not know.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

Step: TypeAlias = tuple[str, Fraction]

ACCURACY = 0.7

_CLAUSES = re.compile(r"[.?!,;]|\b(?:and|then)\b")
_RATE = re.compile(r"\b(?:each|every|per)\b")
_CUES = (
    ("/", re.compile(r"\b(?:equally|divided|split)\b")),
    ("*", re.compile(r"\bhow much (?:do|would)\b|\btimes\b")),
    ("-", re.compile(r"\b(?:gives?|sells?|loses?|eats?|uses?|spends?|drops?|breaks?|off|leaves?|away)\b")),
)
_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": Fraction.__truediv__,
}
_OPPOSITE = {"+": "-", "-": "+", "*": "+", "/": "-"}
_OPENERS = ("", "", "At dawn ", "Far from the crowded harbour ", "Every single morning of that long summer ")
_ENDINGS = (
    "wait",
    "wait together",
    "stand still",
    "come back to the quiet old house",
    "are all that anyone remembers",
)


class OfflinePolicy:
    """A deterministic, imperfect solver: right in about `accuracy` of its answers, and no model needed."""

    def __init__(self, accuracy: float = ACCURACY) -> None:
        self._accuracy = accuracy

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        seed: int,
        temperature: float = 1.0,
        max_tokens: int | None = None,
    ) -> str:
        """Answer the last user message; at temperature 0 the seed is ignored; `max_tokens` counts words."""
        prompt = next((str(message["content"]) for message in reversed(messages) if message["role"] == "user"), "")
        dice = _dice(prompt, seed if temperature > 0 else None)
        answer = _solver(prompt)(prompt, dice, dice.random() < self._accuracy)
        return answer if max_tokens is None else " ".join(answer.split(" ")[:max_tokens])

    async def aclose(self) -> None:
        """Nothing is open."""


def _dice(prompt: str, seed: int | None) -> random.Random:
    digest = hashlib.blake2b(f"{seed}\n{prompt}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))


def _solver(prompt: str) -> Callable[[str, random.Random, bool], str]:
    lowered = prompt.lower()
    if "sort" in lowered and ":" in prompt:
        return _sort
    if "sentence" in lowered and ":" in prompt:
        return _write
    return _calculate if read_steps(prompt) else _give_up


def _give_up(prompt: str, dice: random.Random, right: bool) -> str:
    return dice.choice(["I do not know.", "I am not sure how to answer that."])


def read_steps(problem: str) -> list[Step]:
    """Read a word problem from left to right as `(operation, number)` steps; the first one is the start."""
    steps: list[Step] = []
    for clause in _CLAUSES.split(problem.lower()):
        numbers = [Fraction(number) for number in re.findall(r"\d+", clause)]
        if len(numbers) == 2 and _RATE.search(clause):
            steps += [("+", numbers[0]), ("*", numbers[1])]
        else:
            steps += [(_operation(clause), number) for number in numbers]
    return [("+", steps[0][1]), *steps[1:]] if steps else []


def _operation(clause: str) -> str:
    return next((sign for sign, cue in _CUES if cue.search(clause)), "+")


def _total(steps: Sequence[Step]) -> Fraction:
    total = Fraction(0)
    for sign, number in steps:
        if sign == "/" and number == 0:
            continue
        total = _OPERATIONS[sign](total, number)
    return total


def _calculate(prompt: str, dice: random.Random, right: bool) -> str:
    steps = read_steps(prompt)
    if right:
        return _worked(steps, _total(steps))
    mistaken = dice.choice([_forget_last, _turn_one, _slip])(steps, dice)
    total = _total(mistaken) if mistaken != steps else _total(steps) + dice.choice([-10, -1, 1, 10])
    # Two wrongs can make a right, and then nothing would have been wrong.
    return _worked(mistaken, total if total != _total(steps) else total + 1)


def _forget_last(steps: list[Step], dice: random.Random) -> list[Step]:
    return steps[:-1] if len(steps) > 1 else steps


def _turn_one(steps: list[Step], dice: random.Random) -> list[Step]:
    place = dice.randrange(len(steps))
    sign, number = steps[place]
    return [*steps[:place], (_OPPOSITE[sign], number), *steps[place + 1 :]] if place else steps


def _slip(steps: list[Step], dice: random.Random) -> list[Step]:
    return steps


def _worked(steps: Sequence[Step], total: Fraction) -> str:
    working = str(steps[0][1]) + "".join(f" {sign} {number}" for sign, number in steps[1:])
    shown = str(total) if total.denominator == 1 else f"{float(total):.2f}"
    return f"{working} = {shown}. Answer: {shown}"


def _listed_words(prompt: str) -> list[str]:
    return re.findall(r"[a-z]+", prompt.rpartition(":")[2].lower())


def _sort(prompt: str, dice: random.Random, right: bool) -> str:
    words = sorted(_listed_words(prompt), reverse="reverse" in prompt.lower())
    if not right and len(words) > 1:
        place = dice.randrange(len(words) - 1)
        if dice.random() < 0.5:
            del words[place]
        else:
            words[place : place + 2] = [words[place + 1], words[place]]
    return ", ".join(words)


def _write(prompt: str, dice: random.Random, right: bool) -> str:
    words = _listed_words(prompt)
    dice.shuffle(words)
    if not right:
        words = words[1:]
    subject = ", ".join(f"the {word}" for word in words[:-1])
    joined = f"{subject} and the {words[-1]}" if subject else f"the {words[-1]}" if words else "nothing"
    sentence = f"{dice.choice(_OPENERS)}{joined} {dice.choice(_ENDINGS)}."
    return sentence[0].upper() + sentence[1:]

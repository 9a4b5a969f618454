"""The solver reads prompts, repeats itself exactly, and is wrong in believable ways."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from fractions import Fraction

import pytest
from rolloutbus.shard_workers.environments.offline import OfflinePolicy, read_steps

SORTING = "Sort these words in alphabetical order: pear, apple, fig, kiwi"
SENTENCE = "Write a sentence with these words: boat, rope, gull"
PROBLEM = "Mia has 12 apples. Mia buys 7 more and gives 5 to a friend. How many apples does Mia have now?"


async def ask(prompt: str, seed: int = 0, accuracy: float = 1.0, temperature: float = 1.0) -> str:
    messages = [{"role": "system", "content": "Be brief, in 3 words."}, {"role": "user", "content": prompt}]
    return await OfflinePolicy(accuracy).complete(messages, seed=seed, temperature=temperature)


@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        (PROBLEM, 14),
        ("A baker fills 6 trays with 12 rolls each and sells 40 rolls. How many rolls are left?", 32),
        ("72 pencils are divided equally among 9 children. How many does each child get?", 8),
        ("A ticket costs 8 dollars. How much do 7 tickets cost?", 56),
        ("A train carries 90 people. 45 get off and 12 get on. How many people are on the train?", 57),
        ("Kofi saves 5 coins every week for 8 weeks, then spends 13 coins. How many are left?", 27),
    ],
)
async def test_word_problems_are_read_and_calculated(problem: str, answer: int) -> None:
    assert (await ask(problem)).endswith(f"Answer: {answer}")


def test_steps_stand_in_the_order_of_the_text() -> None:
    assert read_steps(PROBLEM) == [("+", Fraction(12)), ("+", Fraction(7)), ("-", Fraction(5))]
    assert read_steps("There is no number here.") == []


async def test_words_are_sorted_either_way() -> None:
    assert await ask(SORTING) == "apple, fig, kiwi, pear"
    assert await ask(SORTING.replace("alphabetical", "reverse alphabetical")) == "pear, kiwi, fig, apple"


async def test_a_sentence_has_all_its_words_and_one_full_stop() -> None:
    sentence = await ask(SENTENCE)
    assert all(word in sentence for word in ("boat", "rope", "gull"))
    assert sentence.endswith(".")
    assert sentence.count(".") == 1


@pytest.mark.parametrize("prompt", [PROBLEM, SORTING, "A pen costs 2 euros. How much do 2 pens cost?", "Add 3."])
async def test_an_inaccurate_solver_is_never_right_by_chance(prompt: str) -> None:
    right = (await ask(prompt)).rpartition("Answer:")[2]
    wrong = {(await ask(prompt, seed, accuracy=0.0)).rpartition("Answer:")[2] for seed in range(200)}
    assert right not in wrong
    assert len(wrong) > 1


async def test_a_wrong_sentence_lacks_a_word() -> None:
    for seed in range(50):
        sentence = await ask(SENTENCE, seed, accuracy=0.0)
        assert sum(word in sentence for word in ("boat", "rope", "gull")) == 2


async def test_the_share_of_right_answers_is_the_accuracy() -> None:
    answers = [await ask(PROBLEM, seed, accuracy=0.7) for seed in range(2000)]
    assert 0.66 < sum(answer.endswith("Answer: 14") for answer in answers) / len(answers) < 0.74


async def test_seeds_differ_and_temperature_zero_ignores_them() -> None:
    assert len({await ask(SENTENCE, seed) for seed in range(20)}) > 5
    assert len({await ask(SENTENCE, seed, temperature=0.0) for seed in range(20)}) == 1


def test_the_answer_is_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "import asyncio; from rolloutbus.shard_workers.environments.offline import OfflinePolicy; "
        f"print(asyncio.run(OfflinePolicy(0.5).complete([dict(role='user', content={SENTENCE!r})], seed=3)))"
    )
    answers = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert answers == [asyncio.run(ask(SENTENCE, seed=3, accuracy=0.5))] * 2


async def test_what_it_does_not_understand_it_does_not_know() -> None:
    assert "not" in await ask("Who are you?")
    assert "not" in await OfflinePolicy().complete([], seed=1)


async def test_max_tokens_cuts_the_answer() -> None:
    answer = await OfflinePolicy().complete([{"role": "user", "content": SENTENCE}], seed=1, max_tokens=2)
    assert len(answer.split()) == 2

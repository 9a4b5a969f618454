"""How long texts are cut for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolloutbus.broker.wording import excerpt


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("killed by the OOM", "killed by the OOM"),
        ("killed by the OOM killer", "killed by the …"),
        ("killed by it OOM killer", "killed by it …"),
        ("killed by the OO-killer", "killed by the …"),
        ("the first\nline, and more", "the first\nline, …"),
        ("/a/very/long/path/of/a/file", "/a/very/long/pa …"),
        ("", ""),
    ],
)
def test_texts_end_with_a_word_and_show_that_they_were_cut(text: str, said: str) -> None:
    """Ray's reason for a death ended in the middle of a word: "killed by the OOM k); starting it again"."""
    assert excerpt(text, 17) == said


@given(st.text(), st.integers(4, 40))
def test_no_text_is_longer_than_it_may_be_nor_says_anything_else(text: str, limit: int) -> None:
    said = excerpt(text, limit)
    assert len(said) <= limit
    assert text.startswith(said.removesuffix(" …"))

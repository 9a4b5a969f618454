"""Texts cut to a length for people: after a word, and so that one sees it."""

from __future__ import annotations

from typing import Final

_CUT: Final = " …"


def excerpt(text: str, limit: int) -> str:
    """`text` in at most `limit` characters; what is longer ends with a whole word and an ellipsis."""
    if len(text) <= limit:
        return text
    room = limit - len(_CUT)
    # A word that is longer than all of it, such as a path, is cut all the same.
    words = text[: room + 1].rsplit(maxsplit=1)
    kept = words[0] if len(words) > 1 and not text[room].isspace() else text[:room]
    return kept.rstrip() + _CUT

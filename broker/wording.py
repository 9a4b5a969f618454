"""Words for people: texts cut to a length, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
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


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where something known is close, else nothing."""
    close = difflib.get_close_matches(value, sorted(known), n=1, cutoff=0.7) if isinstance(value, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 group`, `2 groups`; `plural` where another s does not make it."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"

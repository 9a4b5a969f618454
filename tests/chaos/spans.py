"""Arithmetic of spans of time: pairs of begin and end, in any unit that both sides share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

Span = tuple[float, float]


def loaded(loads: Iterable[tuple[Span, int]], least: int) -> list[Span]:
    """Where the weights of the spans that overlap come to `least` or more; in order, and none touches the next."""
    edges = [((begin, -size), (end, size)) for (begin, end), size in loads if begin < end]
    steps = sorted(itertools.chain.from_iterable(edges))
    found: list[Span] = []
    load, since = 0, None
    for at, less in steps:
        load -= less
        if load >= least and since is None:
            since = at
        elif load < least and since is not None:
            found.append((since, at))
            since = None
    return found


def union(spans: Iterable[Span]) -> list[Span]:
    return loaded(((span, 1) for span in spans), 1)


def common(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Where both are."""
    return loaded(((span, 1) for span in [*union(spans), *union(others)]), 2)


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Where the first are and the others are not."""
    edges = [-math.inf, *itertools.chain.from_iterable(union(others)), math.inf]
    return common(spans, zip(edges[::2], edges[1::2], strict=True))

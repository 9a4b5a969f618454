"""Every decoder against the committed corpus, and against mutations of it: an error of ours, at once, and without
memory.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rolloutbus.broker import codec
from rolloutbus.broker.errors import DecodeError
from rolloutbus.broker.messages import Failure, ForeignEntryError, unframe

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))
HOSTILE = [path for path in CORPUS if not path.name.startswith("valid-")]
VALID = [path for path in CORPUS if path.name.startswith("valid-")]
SECONDS = 2.0
# Beside the payload itself: interpreter noise, error texts, a decoder's first buffers.
SLACK_BYTES = 4 << 20


def _frames(payload: bytes) -> Any:
    return [codec.decode(view) for view in unframe(payload)]


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "value": codec.decode,
    "rows": codec.decode_rows,
    "frame": _frames,
    "failure": Failure.unpacked,
}


def _decode(decoder: str, payload: bytes) -> tuple[bool, float, int]:
    """Whether it decoded, how long it took, and the peak of memory."""
    tracemalloc.start()
    began = time.process_time()
    try:
        DECODERS[decoder](payload)
        decoded = True
    except (DecodeError, ForeignEntryError):
        decoded = False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return decoded, time.process_time() - began, peak


def test_the_corpus_is_there() -> None:
    assert len(HOSTILE) >= 25
    assert len(VALID) == 3


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_what_the_corpus_was_made_from_decodes(path: Path) -> None:
    assert _decode(path.stem.removeprefix("valid-"), path.read_bytes())[0]


@pytest.mark.parametrize("decoder", ["value", "rows", "frame"])
@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.stem)
def test_a_hostile_payload_is_refused_at_once_and_without_memory(path: Path, decoder: str) -> None:
    payload = path.read_bytes()
    decoded, seconds, peak = _decode(decoder, payload)
    assert not decoded
    assert seconds < SECONDS
    assert peak < 16 * len(payload) + SLACK_BYTES


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.stem)
def test_a_failure_that_cannot_be_read_is_still_a_failure(path: Path) -> None:
    failure = Failure.unpacked(path.read_bytes())
    assert failure.type == "UnreadableFailure"


EDITS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(CORPUS), st.sampled_from(sorted(DECODERS)), EDITS, st.integers(0, 1 << 20))
@example(CORPUS[0], "value", [], 0)
def test_mutations_of_the_corpus_raise_errors_of_ours_or_nothing(
    path: Path, decoder: str, edits: list[tuple[int, int]], cut: int
) -> None:
    payload = bytearray(path.read_bytes())
    for place, byte in edits:
        if payload:
            payload[place % len(payload)] = byte
    size = len(payload) - cut % (len(payload) + 1) if cut % 3 == 0 else len(payload)
    _, seconds, peak = _decode(decoder, bytes(payload[:size]))
    assert seconds < SECONDS
    assert peak < 16 * len(payload) + SLACK_BYTES


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=300))
def test_noise_raises_errors_of_ours_or_nothing(decoder: str, noise: bytes) -> None:
    _, seconds, peak = _decode(decoder, noise)
    assert seconds < SECONDS
    assert peak < SLACK_BYTES

"""Entries as a worker writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolloutbus.broker import codec
from rolloutbus.broker.channel import Payload
from rolloutbus.broker.messages import frame


def rows_payload(results: Sequence[Any]) -> Payload:
    """Results encoded and framed; the worker frames what it has encoded row by row."""
    return frame([Payload.of(codec.encode(result)) for result in results])

"""A free port out of a range."""

from __future__ import annotations

import random
import socket

from .errors import GymStartError


def free_port(host: str, low: int, high: int) -> int:
    """A port in `low`..`high` (`high` excluded) that nobody listens on; Gym picks the others from the same range."""
    for port in random.sample(range(low, high), high - low):
        with socket.socket() as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                attempt.bind((host, port))
            except OSError:
                continue
        return port
    raise GymStartError(
        f"no port of {low} to {high - 1} is free on {host}; give the shard another port_range_low and port_range_high"
    )

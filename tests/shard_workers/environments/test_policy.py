"""The policy's settings, and the client against a real HTTP server on loopback."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import SecretStr
from rolloutbus.broker.errors import ConfigError
from rolloutbus.shard_workers.environments.policy import (
    OfflinePolicy,
    OpenAIPolicy,
    PolicyError,
    PolicyTimeoutError,
    PolicyUnavailableError,
    policy_from_config,
)

KEY = "sk-very-secret-4711"
MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]


def chat(content: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


class Endpoint:
    """An HTTP server that records requests and answers the way the test sets `reply`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []
        self.reply: Callable[[BaseHTTPRequestHandler], None] = self.json(chat("Answer: 2"))
        self.released = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                endpoint.requests.append((self.path, self.headers["Authorization"], json.loads(body)))
                endpoint.reply(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def json(self, body: object, status: int = 200) -> Callable[[BaseHTTPRequestHandler], None]:
        return self.text(json.dumps(body), "application/json", status)

    def text(self, body: str, kind: str, status: int = 200) -> Callable[[BaseHTTPRequestHandler], None]:
        def reply(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            handler.send_header("Content-Type", kind)
            handler.send_header("Content-Length", str(len(body.encode())))
            handler.end_headers()
            handler.wfile.write(body.encode())

        return reply

    def hang_up(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True

    def keep_silent(self, handler: BaseHTTPRequestHandler) -> None:
        self.released.wait(30)

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Endpoint()
    yield server
    server.close()


async def test_an_answer_comes_back_and_the_request_says_everything(endpoint: Endpoint) -> None:
    policy = OpenAIPolicy(endpoint.url, "tiny", KEY)
    answer = await policy.complete(MESSAGES, seed=7, temperature=0.5, max_tokens=9)
    await policy.aclose()
    assert answer == "Answer: 2"
    [(path, authorization, body)] = endpoint.requests
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body == {"model": "tiny", "messages": MESSAGES, "seed": 7, "temperature": 0.5, "max_tokens": 9}


async def test_the_number_of_tokens_is_the_servers_choice_unless_given(endpoint: Endpoint) -> None:
    policy = OpenAIPolicy(endpoint.url, "tiny")
    await policy.complete(MESSAGES, seed=1)
    await policy.aclose()
    assert "max_tokens" not in endpoint.requests[0][2]


async def test_several_endpoints_take_turns(endpoint: Endpoint) -> None:
    other = Endpoint()
    policy = OpenAIPolicy([endpoint.url, other.url], "tiny")
    for seed in range(5):
        await policy.complete(MESSAGES, seed=seed)
    await policy.aclose()
    other.close()
    assert [body["seed"] for _, _, body in endpoint.requests] == [0, 2, 4]
    assert [body["seed"] for _, _, body in other.requests] == [1, 3]


@pytest.mark.parametrize("status", [400, 401, 404, 408, 429, 500, 503])
async def test_an_http_error_keeps_its_status_and_is_asked_once(endpoint: Endpoint, status: int) -> None:
    endpoint.reply = endpoint.json({"error": {"message": f"no good with {KEY}"}}, status)
    policy = OpenAIPolicy(endpoint.url, "tiny", KEY)
    with pytest.raises(PolicyError, match=f"{endpoint.url}.* answered HTTP {status}: .*no good") as raised:
        await policy.complete(MESSAGES, seed=1)
    await policy.aclose()
    assert raised.value.status_code == status
    assert KEY not in str(raised.value)
    assert len(endpoint.requests) == 1


async def test_a_slow_endpoint_is_a_timeout(endpoint: Endpoint) -> None:
    endpoint.reply = endpoint.keep_silent
    policy = OpenAIPolicy(endpoint.url, "tiny", timeout_s=0.2)
    with pytest.raises(PolicyTimeoutError, match="did not answer in time") as raised:
        await policy.complete(MESSAGES, seed=1)
    await policy.aclose()
    assert isinstance(raised.value, TimeoutError)
    assert len(endpoint.requests) == 1


async def test_an_endpoint_that_hangs_up_is_a_lost_connection(endpoint: Endpoint) -> None:
    endpoint.reply = endpoint.hang_up
    policy = OpenAIPolicy(endpoint.url, "tiny")
    with pytest.raises(PolicyUnavailableError, match="cannot be reached") as raised:
        await policy.complete(MESSAGES, seed=1)
    await policy.aclose()
    assert isinstance(raised.value, ConnectionError)


@pytest.mark.parametrize("before", range(280, 300, 3))
async def test_a_key_across_the_cut_does_not_show_its_beginning(endpoint: Endpoint, before: int) -> None:
    endpoint.reply = endpoint.text("x" * before + KEY + " is no key" * 9, "text/plain", 401)
    policy = OpenAIPolicy(endpoint.url, "tiny", KEY)
    with pytest.raises(PolicyError, match="HTTP 401: xxx") as raised:
        await policy.complete(MESSAGES, seed=1)
    await policy.aclose()
    assert KEY[:2] not in str(raised.value)


@pytest.mark.parametrize("key", [None, "", SecretStr(""), "none"])
async def test_without_a_key_the_servers_words_stay_as_they_are(
    endpoint: Endpoint, key: SecretStr | str | None
) -> None:
    endpoint.reply = endpoint.text("none of the models is loaded", "text/plain", 503)
    policy = OpenAIPolicy(endpoint.url, "tiny", key)
    with pytest.raises(PolicyError, match="HTTP 503: none of the models is loaded"):
        await policy.complete(MESSAGES, seed=1)
    await policy.aclose()


async def test_an_endpoint_that_is_down_is_named_without_its_credentials(endpoint: Endpoint) -> None:
    endpoint.close()
    policy = OpenAIPolicy(endpoint.url.replace("127.0.0.1", "me:pa55@127.0.0.1"), "tiny")
    with pytest.raises(PolicyUnavailableError) as raised:
        await policy.complete(MESSAGES, seed=1)
    assert endpoint.url in str(raised.value)
    assert "pa55" not in str(raised.value) + repr(policy)
    await policy.aclose()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("<html>a proxy's greeting</html>", "text/html"),
        ("{broken", "application/json"),
        ('{"hello": "world"}', "application/json"),
        ('{"choices": []}', "application/json"),
        ("[]", "application/json"),
    ],
)
async def test_an_answer_that_is_no_chat_completion_is_an_error(endpoint: Endpoint, body: str, kind: str) -> None:
    endpoint.reply = endpoint.text(body, kind)
    policy = OpenAIPolicy(endpoint.url, "tiny")
    with pytest.raises(PolicyError, match=endpoint.url):
        await policy.complete(MESSAGES, seed=1)
    await policy.aclose()


async def test_a_model_that_says_nothing_gives_an_empty_answer(endpoint: Endpoint) -> None:
    endpoint.reply = endpoint.json(chat(None))
    policy = OpenAIPolicy(endpoint.url, "tiny")
    assert await policy.complete(MESSAGES, seed=1) == ""
    await policy.aclose()


async def test_the_key_shows_nowhere(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        policy = policy_from_config({"policy": {"base_url": endpoint.url, "model": "tiny", "api_key": KEY}})
        await policy.complete(MESSAGES, seed=1)
        await policy.aclose()
    assert endpoint.requests[0][1] == f"Bearer {KEY}"
    assert KEY not in repr(policy) + caplog.text


async def test_what_is_known_at_start_overrides_the_file(endpoint: Endpoint) -> None:
    config = {
        "policy": {"base_url": "http://127.0.0.1:9/v1", "model": "from-file"},
        "policy_base_url": [endpoint.url],
        "policy_model_name": "from-start",
    }
    policy = policy_from_config(config)
    await policy.complete(MESSAGES, seed=1)
    await policy.aclose()
    assert endpoint.requests[0][2]["model"] == "from-start"


async def test_endpoints_given_at_start_suffice(endpoint: Endpoint) -> None:
    policy = policy_from_config({"policy_base_url": endpoint.url, "policy_model_name": "m"})
    assert await policy.complete(MESSAGES, seed=1) == "Answer: 2"
    await policy.aclose()


def test_offline_is_the_solver() -> None:
    config = {"policy": "offline", "policy_base_url": None, "policy_model_name": "ignored"}
    assert isinstance(policy_from_config(config), OfflinePolicy)


async def test_without_a_policy_only_asking_it_is_an_error() -> None:
    policy = policy_from_config({})
    with pytest.raises(ConfigError, match="policy: none is configured"):
        await policy.complete(MESSAGES, seed=1)
    await policy.aclose()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"policy": {"base_url": "http://h/v1", "model": "m", "modell": "x"}}, "policy.modell is not a known key"),
        ({"policy": {"base_url": "http://h/v1", "model": 3}}, "policy.model: "),
        ({"policy": {"base_url": "127.0.0.1:8000/v1", "model": "m"}}, "policy.base_url: "),
        ({"policy": {"base_url": "http://h/v1", "model": "m", "timeout_s": 0}}, "policy.timeout_s: "),
        ({"policy": {"model": "m"}}, "policy.base_url: not given"),
        ({"policy": {"base_url": "http://h/v1"}}, "policy.model: not given"),
        ({"policy": "ofline"}, "policy: 'ofline' is not known; say 'offline'"),
        ({"policy": "offline", "policy_base_url": "http://h/v1"}, "remove one"),
        ({"policy_base_url": 5, "policy_model_name": "m"}, "policy.base_url"),
    ],
)
def test_settings_that_cannot_be_used_are_named_by_their_full_key(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        policy_from_config(config)
    assert said in str(raised.value)


def test_a_wrong_key_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ConfigError) as raised:
        policy_from_config({"policy": {"base_url": "http://h", "model": "m", "api_key": [KEY], "apikey": KEY}})
    assert "policy.api_key" in str(raised.value)
    assert KEY not in str(raised.value)


def test_without_the_openai_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"pip install 'rolloutbus\[openai\]'"):
        policy_from_config({"policy": {"base_url": "http://h/v1", "model": "m"}})

"""The model that rollouts ask: an OpenAI-compatible endpoint, or the offline solver that needs none.

Owns the connections to the endpoint. Promises that a key never shows in a repr, a log line or an error,
that lost connections and timeouts are `ConnectionError` and `TimeoutError`, that an HTTP error keeps its
`status_code`, and that nothing is retried here, because the worker retries whole groups.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from ...broker.errors import ConfigError, RolloutBusError
from ...broker.settings import Seconds, settings_from
from ...broker.wording import excerpt
from .offline import OfflinePolicy

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

__all__ = [
    "Message",
    "OfflinePolicy",
    "OpenAIPolicy",
    "Policy",
    "PolicyError",
    "PolicySettings",
    "PolicyTimeoutError",
    "PolicyUnavailableError",
    "policy_from_config",
]

# A rollout may think for long, but a model server that is up accepts a connection at once.
REQUEST_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
# Servers without a key still want the header, and the client refuses to start without one.
_NO_KEY = "none"

Message: TypeAlias = Mapping[str, Any]


class Policy(Protocol):
    """The model under training, as a rollout function sees it."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        temperature: float = 1.0,
        max_tokens: int | None = None,
    ) -> str:
        """Answer a chat of `{"role", "content"}` messages; the same seed asks for the same answer."""
        ...

    async def aclose(self) -> None:
        """Close what is open; safe to call twice."""
        ...


class PolicyError(RolloutBusError, RuntimeError):
    """The endpoint refused or answered nonsense; `status_code` is the HTTP status where there was one."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class PolicyTimeoutError(PolicyError, TimeoutError):
    """The endpoint did not answer in time."""


class PolicyUnavailableError(PolicyError, ConnectionError):
    """The endpoint cannot be reached, or hung up."""


def _as_list(urls: Any) -> Any:
    return [urls] if isinstance(urls, str) else urls or []


def _http_only(urls: list[str]) -> list[str]:
    if all(urlsplit(url).scheme in {"http", "https"} for url in urls):
        return urls
    raise ValueError("an endpoint starts with http:// or https://, as in http://127.0.0.1:8000/v1")


class PolicySettings(BaseModel):
    """The mapping under the config key `policy`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_http_only)] = []
    model: str = ""
    api_key: SecretStr | None = None
    timeout_s: Seconds = Field(REQUEST_TIMEOUT_S, gt=0)


class OpenAIPolicy:
    """Chat completions of one model behind one or several equal endpoints, which take turns."""

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str,
        api_key: SecretStr | str | None = None,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._openai = _import_openai()
        self._model = model
        given = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key
        self._key = SecretStr(given or _NO_KEY)
        self._clients = [self._connect(url, timeout_s) for url in _as_list(base_url)]
        self._turns = itertools.cycle(self._clients)

    def __repr__(self) -> str:
        return f"OpenAIPolicy(model={self._model!r}, endpoints={[_shown(client) for client in self._clients]})"

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        temperature: float = 1.0,
        max_tokens: int | None = None,
    ) -> str:
        """Ask the endpoint whose turn it is; raises `PolicyError` or one of its subclasses."""
        client = next(self._turns)
        request: dict[str, Any] = {"messages": list(messages), "seed": seed, "temperature": temperature}
        if max_tokens is not None:
            request["max_tokens"] = max_tokens
        # Typed loosely: the overloads want every optional argument spelt out, and we send only what was given.
        create: Any = client.chat.completions.create
        try:
            answer = cast(object, await create(model=self._model, **request))
        except self._openai.APITimeoutError as error:
            raise PolicyTimeoutError(f"{self._where(client)} did not answer in time") from error
        except self._openai.APIConnectionError as error:
            # The client says only "Connection error."; what went wrong stands underneath.
            reason = error.__cause__ or error
            said = f"{type(reason).__name__}: {self._masked(str(reason))}"
            raise PolicyUnavailableError(f"{self._where(client)} cannot be reached ({said}); is it up?") from error
        except self._openai.APIStatusError as error:
            raise self._refused(client, error) from error
        except (self._openai.OpenAIError, ValueError) as error:
            said = self._masked(str(error))
            raise PolicyError(f"{self._where(client)} answered what is no chat completion: {said}") from error
        return self._text(client, answer)

    async def aclose(self) -> None:
        """Close every connection."""
        for client in self._clients:
            await client.close()

    def _connect(self, url: str, timeout_s: float) -> AsyncOpenAI:
        timeout = self._openai.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        key = self._key.get_secret_value()
        return self._openai.AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=0)

    def _where(self, client: AsyncOpenAI) -> str:
        return f"the policy endpoint {_shown(client)} (model {self._model!r})"

    def _refused(self, client: AsyncOpenAI, error: APIStatusError) -> PolicyError:
        # Masked before it is cut, or a key across the cut would show its beginning.
        body = excerpt(self._masked(error.response.text), 300)
        return PolicyError(f"{self._where(client)} answered HTTP {error.status_code}: {body}", error.status_code)

    def _masked(self, text: str) -> str:
        key = self._key.get_secret_value()
        return text if key == _NO_KEY else text.replace(key, "***")

    def _text(self, client: AsyncOpenAI, answer: object) -> str:
        choices: object = getattr(answer, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise PolicyError(f"{self._where(client)} answered without choices; does base_url end in /v1?")
        message = getattr(cast(list[object], choices)[0], "message", None)
        # A model that spends all its tokens on hidden reasoning answers null: an empty answer, not an error.
        return cast(str | None, getattr(message, "content", None)) or ""


class _MissingPolicy:
    """Stands in where no policy is configured, so that environments without a model need none."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        temperature: float = 1.0,
        max_tokens: int | None = None,
    ) -> str:
        raise ConfigError("policy: none is configured; say policy: offline, or policy: {base_url: …, model: …}")

    async def aclose(self) -> None:
        pass


def policy_from_config(config: Mapping[str, Any]) -> Policy:
    """Build the policy that a merged config asks for.

    `policy` is `offline` or a mapping of `PolicySettings`. `policy_base_url` and `policy_model_name`, which
    are known only once generation runs, override what the file says. Without any of them the policy raises
    when it is asked.
    """
    wanted: object = config.get("policy")
    late = {"base_url": config.get("policy_base_url"), "model": config.get("policy_model_name")}
    given = {key: value for key, value in late.items() if value}
    if wanted == "offline":
        return _offline(given)
    if wanted is None and not given:
        return _MissingPolicy()
    if wanted is not None and not isinstance(wanted, Mapping):
        raise ConfigError(f"policy: {wanted!r} is not known; say 'offline', or give base_url and model")
    return _endpoint({**cast("Mapping[str, Any]", wanted or {}), **given})


def _offline(given: Mapping[str, Any]) -> OfflinePolicy:
    if "base_url" in given:
        raise ConfigError(
            "policy: 'offline' was configured and policy_base_url names an endpoint; remove one, "
            "because rollouts of the offline solver would teach the model nothing"
        )
    return OfflinePolicy()


def _endpoint(values: Mapping[str, Any]) -> OpenAIPolicy:
    settings = settings_from(PolicySettings, values, "policy")
    if not settings.base_url:
        raise ConfigError("policy.base_url: not given; set it, or give policy_base_url at start")
    if not settings.model:
        raise ConfigError("policy.model: not given; set it, or give policy_model_name at start")
    return OpenAIPolicy(settings.base_url, settings.model, settings.api_key, timeout_s=settings.timeout_s)


def _import_openai() -> Any:
    try:
        return importlib.import_module("openai")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"policy: an endpoint needs the package {error.name!r}; pip install 'rolloutbus[openai]', "
            f"or say policy: offline"
        ) from None


def _shown(client: AsyncOpenAI) -> str:
    url = urlsplit(str(client.base_url))
    return url._replace(netloc=url.netloc.rpartition("@")[2], query="").geturl()

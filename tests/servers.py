"""The brokers that tests run against: real servers of two makes, and an in-memory one for what does not block."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from typing import Any, cast

import fakeredis
import redis.exceptions
from rolloutbus.broker.channel import Arg, Command, Payload, ReplyError
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import EmbeddedBrokerError

REDIS_MISSING = (
    "these tests need Redis 7.0 or newer beside the embedded Valkey, and there is no redis-server in PATH: "
    "`apt-get install redis-server` (Debian, Ubuntu) or `brew install redis`"
)


def start_valkey(**options: Any) -> EmbeddedBroker:
    """The embedded server that the product brings."""
    return EmbeddedBroker(**options).start()


def start_redis(**options: Any) -> EmbeddedBroker:
    """The machine's own redis-server, supervised in the same way; its absence is an error and no reason to skip."""
    if shutil.which("redis-server") is None:
        raise EmbeddedBrokerError(REDIS_MISSING)
    return EmbeddedBroker(binary="redis-server", **options).start()


class FakeRunner:
    """Commands on fakeredis with the replies that a `Link` would bring: bytes, lists, and `ReplyError`s in their place.

    It strips the `#!lua` line, which fakeredis takes for a syntax error, and keeps the hash that the product knows the
    script by.
    """

    def __init__(self) -> None:
        pool = cast(Any, fakeredis.FakeRedis(version=(7,))).connection_pool
        self._connection = pool.get_connection()
        self._shas: dict[str, bytes] = {}

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        return [self._reply(self._send([_flat(arg) for arg in command])) for command in commands]

    def _send(self, words: list[Any]) -> Any:
        if words[:2] == ["SCRIPT", "LOAD"]:
            source: str = words[2]
            plain = source.partition("\n")[2] if source.startswith("#!") else source
            sha = self._shas[hashlib.sha1(source.encode()).hexdigest()] = self._call(["SCRIPT", "LOAD", plain])
            return sha
        if words[0] == "EVALSHA":
            words[1] = self._shas.get(words[1], words[1])
        return self._call(words)

    def _call(self, words: list[Any]) -> Any:
        try:
            self._connection.send_command(*words)
            return self._connection.read_response()
        except (redis.exceptions.RedisError, AttributeError) as error:
            return error

    def _reply(self, reply: Any) -> Any:
        if isinstance(reply, redis.exceptions.NoScriptError):
            return ReplyError(f"NOSCRIPT {reply}")
        if isinstance(reply, AttributeError):
            # What fakeredis makes of a key of the wrong type.
            return ReplyError(f"WRONGTYPE {reply}")
        if isinstance(reply, Exception):
            return ReplyError(str(reply))
        if isinstance(reply, dict):
            return [[name, self._reply(value)] for name, value in cast("dict[Any, Any]", reply).items()]
        if isinstance(reply, list | tuple):
            return [self._reply(item) for item in cast("Sequence[Any]", reply)]
        return reply


def _flat(arg: Arg) -> Any:
    return arg.joined() if isinstance(arg, Payload) else arg

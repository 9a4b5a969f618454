"""The dead letters of a run: groups that failed for good, kept whole in a capped stream, oldest first.

A letter is read without its rows, which may be large, until somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import codec
from .channel import ReplyError
from .errors import DecodeError, UnknownBatchError
from .handshake import translate
from .keys import Keys
from .messages import Failure, ReplayOrigin
from .steps import Runner

# Few at a time, since the broker serves nobody else while it looks at their payloads.
_PAGE = 10
_READ = """
local out = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  local words = { entry[1] }
  for at = 1, #entry[2], 2 do
    local value = entry[2][at + 1]
    if entry[2][at] == 'payload' then value = tostring(#value) end
    words[#words + 1] = entry[2][at]
    words[#words + 1] = value
  end
  out[#out + 1] = words
end
return out
"""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that was buried. `reason` is the transition's word; `rows` and `payload_bytes` say how much is kept;
    `origin` what it was before it was replayed.
    """

    entry: str
    batch: str
    group: int
    client: str
    route: str
    rows: int
    first_row: int
    reason: str
    failure: Failure | None
    attempt: int
    instance: str
    payload_bytes: int
    origin: ReplayOrigin | None = None

    @property
    def group_id(self) -> str:
        return f"{self.batch}:{self.group}"

    @property
    def buried_ms(self) -> int:
        """When, in broker time."""
        return int(self.entry.partition("-")[0])

    @property
    def next_origin(self) -> ReplayOrigin:
        """What is told of its group once more when that is replayed: where it comes from first of all."""
        if self.origin is not None:
            return replace(self.origin, replays=self.origin.replays + 1)
        return ReplayOrigin(self.batch, self.group, self.client, self.first_row, self.entry, 1)


async def read_dead_letters(runner: Runner, keys: Keys) -> list[DeadLetter]:
    """All letters that are still there, without their rows."""
    letters: list[DeadLetter] = []
    start = "-"
    while True:
        page = (await runner.run([("EVAL_RO", _READ, 1, keys.dead, start, _PAGE)]))[0]
        if isinstance(page, ReplyError):
            raise translate(page, "the broker")
        letters += [_letter(words) for words in page]
        if len(page) < _PAGE:
            return letters
        start = f"({letters[-1].entry}"


async def find_dead_letter(runner: Runner, keys: Keys, name: str) -> DeadLetter:
    """The letter with this entry id or, as `BATCH:GROUP`, the newest of that group, also of one that was replayed since
    under another name; raises `UnknownBatchError`.
    """
    letters = await read_dead_letters(runner, keys)
    found = [letter for letter in letters if name in _names(letter)]
    if not found:
        raise UnknownBatchError(
            f"run {keys.run!r} has no dead letter {name!r} among its {len(letters)}; "
            "`rolloutbus dead list` shows their ids"
        )
    return found[-1]


def _names(letter: DeadLetter) -> list[str]:
    return [letter.entry, letter.group_id, *([letter.origin.group_id] if letter.origin else [])]


async def read_rows(runner: Runner, keys: Keys, letter: DeadLetter) -> list[dict[str, Any]]:
    """The rows of the letter's group, as published; raises `DecodeError` where they are not kept or not ours."""
    found = (await runner.run([("XRANGE", keys.dead, letter.entry, letter.entry)]))[0]
    if isinstance(found, ReplyError):
        raise translate(found, "the broker")
    words = dict(zip(found[0][1][::2], found[0][1][1::2], strict=True)) if found else {}
    if b"payload" not in words:
        raise DecodeError(
            f"dead letter {letter.entry} (group {letter.group_id}) has no rows with it: "
            "its entry was gone when it was buried"
        )
    return codec.decode_rows(words[b"payload"])


async def drop_dead_letters(runner: Runner, keys: Keys, entries: Sequence[str]) -> int:
    """Delete letters; how many there were."""
    if not entries:
        return 0
    deleted = (await runner.run([("XDEL", keys.dead, *entries)]))[0]
    if isinstance(deleted, ReplyError):
        raise translate(deleted, "the broker")
    return int(deleted)


def _letter(words: Sequence[bytes]) -> DeadLetter:
    """A stranger's entry may lack any field."""
    raw = dict(zip(words[1::2], words[2::2], strict=True))
    text = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in raw.items()
        if name != b"failure"
    }
    detail = text.get("detail", "")
    return DeadLetter(
        entry=words[0].decode(),
        batch=text.get("batch", "-"),
        group=_number(text, "group", -1),
        client=text.get("client", ""),
        route=text.get("route", ""),
        rows=_number(text, "rows", 0),
        first_row=_number(text, "first_row", 0),
        reason=text.get("reason", "") + (f": {detail}" if detail else ""),
        failure=Failure.unpacked(raw[b"failure"]) if b"failure" in raw else None,
        attempt=_number(text, "failed_attempt", 0),
        instance=text.get("failed_on", ""),
        payload_bytes=_number(text, "payload", 0),
        origin=_origin(text),
    )


def _origin(text: dict[str, str]) -> ReplayOrigin | None:
    """Letters of groups that were not replayed have none, and so have those of earlier versions."""
    if "origin_letter" not in text:
        return None
    return ReplayOrigin(
        batch=text.get("origin_batch", "-"),
        group=_number(text, "origin_group", -1),
        client=text.get("origin_client", ""),
        first_row=_number(text, "origin_first_row", 0),
        letter=text["origin_letter"],
        replays=_number(text, "origin_replays", 0),
    )


def _number(text: dict[str, str], name: str, otherwise: int) -> int:
    value = text.get(name, "")
    return int(value) if value.isdecimal() else otherwise

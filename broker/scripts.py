"""The Lua sources, put together and named by their hash.

Each script begins with what it shares (`prelude`, and of the others what it calls), so one EVALSHA is one
transition. The hash in the call lets two product versions share a broker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .channel import raise_first_error

if TYPE_CHECKING:
    from .channel import Arg, Channel, Command

_FOLDER = Path(__file__).parent / "lua"
_SHARED = ("prelude", "keep_letter", "bury", "purge")


@dataclass(frozen=True, slots=True)
class Script:
    """One transition: its source, the hash the server knows it by, and how to call it."""

    name: str
    source: str
    sha: str

    def call(self, keys: Sequence[str], *args: Arg) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


def _read(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def _assemble(name: str) -> Script:
    body = _read(name)
    shebang, _, source = body.partition("\n") if body.startswith("#!") else ("", "", body)
    # From the last one on, because each may call those before it.
    for part in reversed(_SHARED):
        if part == "prelude" or f"{part}(" in source:
            source = f"{_read(part)}\n{source}"
    source = "\n".join([shebang] * bool(shebang) + [source])
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())


SCRIPTS = {path.stem: _assemble(path.stem) for path in sorted(_FOLDER.glob("*.lua")) if path.stem not in _SHARED}


async def load_scripts(channel: Channel) -> None:
    """Give the server every script; done on each new connection, because a restarted server has forgotten them."""
    raise_first_error(await channel.pipeline([("SCRIPT", "LOAD", script.source) for script in SCRIPTS.values()]))

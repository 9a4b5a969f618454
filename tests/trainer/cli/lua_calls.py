"""Which command a script may ever send to which family of keys, read from its source with the keys of a real call.

Whatever it cannot make out is an error, so nothing passes unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FAMILIES = {"batch", "accepted", "owner", "groups", "delayed", "parked", "results", "instance", "dead", "events"}
# By function: names that stand for keys which the server itself has named.
FOUND_BY_SCAN = {"open_batch": {"key": frozenset({"batch"})}}
KEYLESS = {"time", "scan"}
NAMES_SEVERAL = {"del", "exists"}
SUBCOMMANDS = {"memory", "xgroup", "xinfo"}

Family = frozenset[str]
Names = Mapping[str, Family]


_NONE: Family = frozenset()


class Use(NamedTuple):
    """One command on keys of these families, all of which it names at once."""

    command: str
    families: Family


@dataclass
class Function:
    parameters: list[str]
    body: str


def uses_of(source: str, keys: Sequence[str]) -> set[Use]:
    """All that the script may send when it is called with `keys`, the family of each."""
    text = re.sub(r"^#!.*|--.*", "", source, flags=re.MULTILINE)
    functions, main = _functions(text)
    return set(_Reader(functions, list(keys)).read(main, {}))


def _functions(text: str) -> tuple[dict[str, Function], str]:
    """Every function by its name, and what is left without them; those inside others too."""
    plain = re.sub(r"'[^'\n]*'", lambda found: "'" + "_" * (len(found[0]) - 2) + "'", text)
    functions: dict[str, Function] = {}
    rest, at = "", 0
    for found in re.finditer(r"local function (\w+)\((.*?)\)", plain):
        end = _end_of_block(plain, found.end())
        inner = text[found.end() : end - len("end")]
        functions[found[1]] = Function(re.findall(r"\w+", found[2]), _functions(inner)[1])
        if found.start() >= at:
            rest, at = rest + text[at : found.start()], end
    return functions, rest + text[at:]


def _end_of_block(plain: str, start: int) -> int:
    depth = 1
    for word in re.finditer(r"\b(function|if|do|repeat|end|until)\b", plain[start:]):
        depth += -1 if word[0] in ("end", "until") else 1
        if not depth:
            return start + word.end()
    raise AssertionError("a function without an end")


class _Reader:
    """Follows each call of a function with the families that its parameters stand for."""

    def __init__(self, functions: Mapping[str, Function], keys: list[str]) -> None:
        self._functions = functions
        self._keys = keys

    def read(self, text: str, known: Names) -> Iterator[Use]:
        names = {**known, **self._locals(text, known)}
        for found in re.finditer(r"\b(redis\.p?call|\w+)\(", text):
            words = _arguments(text, found.end())
            if found[1].startswith("redis."):
                yield from self._command(words, text[: found.start()], names)
            elif function := self._functions.get(found[1]):
                pairs = zip(function.parameters, words, strict=False)
                given = {name: self._family(word, text[: found.start()], names) for name, word in pairs}
                yield from self.read(function.body, {**names, **given, **FOUND_BY_SCAN.get(found[1], {})})

    def _locals(self, text: str, known: Names) -> dict[str, Family]:
        found: dict[str, Family] = {}
        for one in re.finditer(r"local ([\w, ]+) = (.*)", text):
            for name, word in zip(one[1].split(", "), _arguments(one[2] + ")", 0), strict=False):
                # A key's name as it stands, and nothing that is made of what a command answered.
                if "call(" not in word and (family := self._family(word, text[: one.start()], {**known, **found})):
                    found[name] = family
        for one in re.finditer(r"for _, (\w+) in ipairs\(\{(.*?)\}\)", text):
            listed = [self._family(word, text[: one.start()], known) for word in _arguments(one[2] + ")", 0)]
            if all(listed):
                found[one[1]] = _NONE.union(*listed)
        return found

    def _command(self, words: list[str], before: str, names: Names) -> Iterator[Use]:
        command, *rest = [word.strip() for word in words]
        command = command.strip("'").lower()
        if command in KEYLESS:
            return
        if command in SUBCOMMANDS:
            command, rest = f"{command}|{rest[0].strip(chr(39)).lower()}", rest[1:]
        named = [self._family(word, before, names) for word in (rest if command in NAMES_SEVERAL else rest[:1])]
        assert named, words
        assert all(named), f"whose key is it? {words}"
        if command in NAMES_SEVERAL:
            yield Use(command, _NONE.union(*named))
        else:
            yield from (Use(command, frozenset({family})) for family in named[0])

    def _family(self, word: str, before: str, names: Names) -> Family:
        """The families of which this may be a key; none where it is no key."""
        word = word.strip()
        if word in names:
            return names[word]
        if word == "unpack(KEYS)":
            return frozenset(self._keys)
        if places := re.findall(r"KEYS\[((?:[^\[\]]|\[[^\]]*\])+)\]", word):
            return _NONE.union(*(self._at(place, before) for place in places))
        if (field := re.fullmatch(r"\w+\.(\w+)", word)) and field[1] in FAMILIES:
            return frozenset({field[1]})
        if named := FAMILIES & {*re.findall(r"'(\w+):'", word)}:
            return frozenset(named)
        return names.get(word.partition(" .. ")[0], _NONE)

    def _at(self, place: str, before: str) -> Family:
        if place.isdigit():
            return frozenset({self._keys[int(place) - 1]})
        at = re.fullmatch(r"i(?: \+ (\d))?", place)
        loops = re.findall(r"for i = (\d+), #KEYS(?:, (\d+))? do", before)
        if not at or not loops:
            # A place that an argument names is one of those of which there may be any number: they stand last.
            return frozenset({self._keys[-1]})
        start, step = loops[-1]
        return frozenset(self._keys[int(start) - 1 + int(at[1] or 0) :: int(step or 1)])


def _arguments(text: str, start: int) -> list[str]:
    """What stands between the commas of the call that begins at `start`, up to its end or that of the text."""
    words, depth, quoted = [""], 0, False
    for sign in text[start:]:
        quoted ^= sign == "'"
        depth += 0 if quoted else (sign in "({[") - (sign in ")}]")
        if depth < 0:
            break
        if sign == "," and not depth and not quoted:
            words.append("")
        else:
            words[-1] += sign
    return [word.strip() for word in words]

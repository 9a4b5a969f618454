"""Says why a value cannot go on the wire, and where inside it the reason sits.

Runs only after packing has failed, so it may be slow: it walks the value again, asks about each leaf, and gives one
sentence: where, the path, what stands there, and what to do instead. It never recurses, whatever the nesting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

from .errors import EncodeError

MAX_DEPTH = 1024
"""Levels of lists and dicts that msgpack can unpack again; msgpack before 1.2 packs 511 of them."""

# `type` itself, under a signature that does not narrow what it is asked about.
class_of = cast("Callable[[object], type[Any]]", type)

_LONGEST_PATH = 240
_TOWARDS_PLAIN_DATA = {
    "builtins.set": "convert it to a list",
    "builtins.frozenset": "convert it to a list",
    "builtins.range": "convert it to a list",
    "builtins.generator": "convert it to a list",
    "builtins.complex": "convert it to a list of two floats",
    "collections.deque": "convert it to a list",
    "collections.abc.Mapping": "convert it to a dict",
    "dataclasses": "convert it with dataclasses.asdict",
    "datetime.date": "convert it to a str with isoformat()",
    "datetime.time": "convert it to a str with isoformat()",
    "datetime.timedelta": "convert it to a float with total_seconds()",
    "decimal.Decimal": "convert it to a str or a float",
    "enum.Enum": "send its .value",
    "fractions.Fraction": "convert it to a str or a float",
    "pathlib.PurePath": "convert it to a str",
    "uuid.UUID": "convert it to a str",
}


class Refused(Exception):
    """One object that cannot be carried; the text continues a sentence that starts with the object's path."""


class TooNested(Refused):
    """A registered type inside too many others; said as it is, because explaining it would nest as deeply again."""


class _Node(NamedTuple):
    value: Any
    step: str
    parent: _Node | None
    depth: int

    def path(self) -> str:
        steps: list[str] = []
        node: _Node | None = self
        while node is not None:
            steps.append(node.step)
            node = node.parent
        path = "".join(reversed(steps)).removeprefix(".")
        return path if len(path) <= _LONGEST_PATH else f"{path[:160]}…{path[-60:]}"


def encode_error(
    value: object,
    where: str,
    cause: Exception,
    *,
    try_pack: Callable[[Any], object],
    opaque: Collection[type],
) -> EncodeError:
    """The error for `value`, whose packing raised `cause`; `opaque` types are packed whole and not looked into."""
    found = _first_problem(value, try_pack, opaque)
    if found is None:
        return EncodeError(f"{where} cannot be packed: {cause}")
    node, reason = found
    path = node.path()
    return EncodeError(f"{where}: {path} {reason}" if path else f"{where} {reason}")


def why_unknown(value: object) -> Refused:
    """The refusal of a type that neither msgpack nor the codec knows."""
    kind = type(value)
    name = kind.__name__
    article = "an" if name[:1] in "AEIOUaeiou" else "a"
    return Refused(f"is {article} {name}, which msgpack cannot carry; {_advice(kind)}")


def _advice(kind: type) -> str:
    if hasattr(kind, "__dataclass_fields__"):
        return _TOWARDS_PLAIN_DATA["dataclasses"]
    for base in kind.__mro__:
        advice = _TOWARDS_PLAIN_DATA.get(f"{base.__module__}.{base.__qualname__}")
        # pathlib moved its classes into a package in 3.13, and decimal is C or Python: only the top module is stable.
        advice = advice or _TOWARDS_PLAIN_DATA.get(f"{base.__module__.partition('.')[0]}.{base.__qualname__}")
        if advice:
            return advice
    if issubclass(kind, Mapping):
        return _TOWARDS_PLAIN_DATA["collections.abc.Mapping"]
    return "convert it to plain data, or register its type with codec.register"


def _first_problem(
    root: object, try_pack: Callable[[Any], object], opaque: Collection[type]
) -> tuple[_Node, str] | None:
    stack = [_Node(root, "", None, 0)]
    while stack:
        node = stack.pop()
        if class_of(node.value) in opaque or not _is_container(node.value):
            reason = _why(node.value, try_pack)
        elif node.depth >= MAX_DEPTH:
            return _too_deep(node)
        else:
            reason = _why_key(node.value, try_pack)
            stack.extend(reversed(list(_children(node))))
        if reason:
            return node, reason
    return None


def _is_container(value: object) -> bool:
    return isinstance(value, (dict, list, tuple))


def _children(node: _Node) -> Iterator[_Node]:
    if isinstance(node.value, dict):
        for key, value in cast("dict[Any, Any]", node.value).items():
            named = isinstance(key, str) and key.isidentifier()
            yield _Node(value, f".{key}" if named else f"[{_shown(key)}]", node, node.depth + 1)
    else:
        for index, value in enumerate(node.value):
            yield _Node(value, f"[{index}]", node, node.depth + 1)


def _why(leaf: object, try_pack: Callable[[Any], object]) -> str | None:
    try:
        try_pack(leaf)
    except Refused as refused:
        return str(refused)
    except UnicodeEncodeError as error:
        return (
            f"is a str with a lone surrogate at position {error.start}, which UTF-8 cannot carry; "
            "clean it, for example with text.encode('utf-8', 'replace').decode()"
        )
    except (ValueError, OverflowError, TypeError) as error:
        return f"cannot be packed: {error}"
    return None


def _why_key(container: object, try_pack: Callable[[Any], object]) -> str | None:
    if not isinstance(container, dict):
        return None
    for key in cast("dict[Any, Any]", container):
        if issubclass(class_of(key), tuple):
            return f"has the key {_shown(key)}, a tuple, which comes back as a list and cannot be a key; use a str"
        if reason := _why(key, try_pack):
            return f"has the key {_shown(key)}, which {reason}"
    return None


def _shown(key: object) -> str:
    text = ascii(key)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _too_deep(node: _Node) -> tuple[_Node, str]:
    chain: list[_Node] = []
    parent: _Node | None = node
    while parent is not None:
        chain.append(parent)
        parent = parent.parent
    seen: set[int] = set()
    for link in reversed(chain):
        if id(link.value) in seen:
            return link, "contains itself, and a cycle cannot go on the wire; break it"
        seen.add(id(link.value))
    return chain[-1], f"is nested more than {MAX_DEPTH} levels deep, which msgpack cannot carry; flatten it"

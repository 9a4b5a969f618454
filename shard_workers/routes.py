"""Which shard a route leads to, and whether the data only names routes that lead somewhere.

Routes come from what running stacks report, never from the config, which rolloutbus does not interpret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from ..broker.errors import RouteError
from ..broker.keys import ANY_ROUTE
from ..broker.routes import route_of
from ..broker.wording import did_you_mean
from .plan_errors import ShardSetupError
from .plan_spec import GYM_ROUTABLE_KEYS
from .plan_text import names, shown

# A data set with the wrong split can name thousands of routes; the first few show what is wrong.
_MAX_LISTED = 20

Rows = Iterable[Mapping[str, Any]]
Datasets = Mapping[str, Any] | Rows | str | os.PathLike[str]


def build_route_shard_map(
    entries_by_shard: Mapping[str, Mapping[str, Collection[str]]],
    allowed_duplicate_entries: Collection[str] = frozenset(),
) -> dict[str, str]:
    """Turn what shards report, `{shard: {entry: [server types]}}`, into `{route: shard}`.

    Only entries with a type of `GYM_ROUTABLE_KEYS` are routes. Raises `ShardSetupError` for an entry that two
    shards host as a route, and for any other entry in two shards unless it is in `allowed_duplicate_entries`.
    """
    hosts: dict[str, list[str]] = {}
    routes: dict[str, list[str]] = {}
    for shard, entries in entries_by_shard.items():
        for entry, types in entries.items():
            hosts.setdefault(entry, []).append(shard)
            if _is_routable(types, entry, shard):
                routes.setdefault(entry, []).append(shard)
    problems = [
        problem
        for entry, shards in hosts.items()
        if (problem := _duplicate(entry, shards, routes.get(entry, []), entry in allowed_duplicate_entries))
    ]
    if problems:
        raise ShardSetupError("; ".join(problems))
    return {route: shards[0] for route, shards in routes.items()}


def _is_routable(types: object, entry: str, shard: str) -> bool:
    # A string is a collection of letters, none of them routable: the entry would vanish without a word.
    if isinstance(types, str) or not isinstance(types, Collection):
        raise ShardSetupError(
            f"shard {shard!r} reports {shown(types)} for entry {entry!r}; list_entries() of its environment "
            "must give a list of server types per entry"
        )
    return any(kind in GYM_ROUTABLE_KEYS for kind in cast("Collection[object]", types))


def _duplicate(entry: str, hosts: list[str], routing: list[str], allowed: bool) -> str | None:
    if len(routing) > 1:
        return (
            f"entry {entry!r} can be routed to in shards {names(routing)}, so its rows could go to either; "
            "keep it in the `config_paths` and `inherited_overlays` of one shard, or give one of them "
            "another name"
        )
    if len(hosts) > 1 and not allowed:
        return (
            f"entry {entry!r} runs in shards {names(hosts)}, which may start the same model engine twice; "
            "keep it in one shard, or, if each shard is to have its own, name it in "
            "`env.nemo_gym.allowed_duplicate_entries`"
        )
    return None


def validate_dataset_routes(route_map: Mapping[str, str] | None, datasets: Datasets | None) -> None:
    """Check before the first step that every row of every split names a route that some shard hosts.

    `datasets` maps a split's name to rows, to the path of a JSONL file, or to a mapping of those
    (`val/math`); rows or one path alone will do; null is no data. Everything is read, so a one-shot iterator
    is used up. An unsharded run, whose map is None or `{"*": shard}`, is not checked, because every route
    leads to its only shard.

    Raises `ShardSetupError` with each split's unhosted routes, where they first stand, and the routes there
    are; and for a file that cannot be read, a line that is no JSON object, and a row without a route.
    """
    if route_map is None or ANY_ROUTE in route_map:
        return
    problems: list[str] = []
    for split, source in _splits("", datasets):
        unhosted = _unhosted_routes(split, source, route_map)
        if unhosted:
            problems.append(f"split {split!r} names {_listed(unhosted, route_map)}")
    if problems:
        hosted = ", ".join(f"{route!r} (shard {shard!r})" for route, shard in sorted(route_map.items()))
        raise ShardSetupError(
            f"no shard hosts these routes: {'; '.join(problems)}. Hosted are {hosted or '(none)'}. Correct "
            "`agent_ref.name` or `task_source` of those rows, or add the config file with that entry to a "
            "shard's `config_paths`"
        )


@dataclass
class _Unhosted:
    """One route that leads nowhere: where it first stands, and how often."""

    first: str
    rows: int = 0


def _unhosted_routes(split: str, source: object, route_map: Mapping[str, str]) -> dict[str, _Unhosted]:
    unhosted: dict[str, _Unhosted] = {}
    for place, row in _rows(split, source):
        try:
            route = route_of(row)
        except RouteError as error:
            raise ShardSetupError(f"split {split!r}, {place}: {error}") from None
        if route not in route_map:
            unhosted.setdefault(route, _Unhosted(first=place)).rows += 1
    return unhosted


def _listed(unhosted: dict[str, _Unhosted], route_map: Mapping[str, str]) -> str:
    listed = [
        f"{route!r}{did_you_mean(route, route_map)} in {where.rows} row{'s' * (where.rows > 1)}, first {where.first}"
        for route, where in islice(unhosted.items(), _MAX_LISTED)
    ]
    if len(unhosted) > _MAX_LISTED:
        listed.append(f"and {len(unhosted) - _MAX_LISTED} more routes")
    return ", ".join(listed)


def _splits(prefix: str, datasets: object) -> Iterator[tuple[str, object]]:
    """Flatten nested mappings of splits, their names joined with slashes."""
    if datasets is None:
        return
    if not isinstance(datasets, Mapping):
        yield prefix or "dataset", datasets
        return
    for name, source in cast("Mapping[str, object]", datasets).items():
        yield from _splits(f"{prefix}/{name}" if prefix else str(name), source)


def _rows(split: str, source: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with the place where its reader finds it."""
    if isinstance(source, (str, os.PathLike)):
        yield from _file_rows(split, os.fspath(cast("str | os.PathLike[str]", source)))
        return
    try:
        rows = iter(cast("Iterable[object]", source))
    except TypeError:
        raise ShardSetupError(
            f"split {split!r} must be rows, the path of a JSONL file, or a mapping of those, but is {shown(source)}"
        ) from None
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ShardSetupError(f"split {split!r}, row {index}: a row must be a dict, but is {shown(row)}")
        yield f"row {index}", cast("Mapping[str, Any]", row)


def _file_rows(split: str, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        # Line by line, because training sets are larger than the memory a check should take.
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path} line {number}"
                    yield place, _json_row(f"split {split!r}, {place}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise ShardSetupError(
            f"split {split!r}: cannot read {path} as JSONL: {_reason(error)}; give the path of a UTF-8 text file with "
            "one JSON object per line"
        ) from None


def _json_row(place: str, line: str) -> Mapping[str, Any]:
    try:
        row: object = json.loads(line.strip())
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ShardSetupError(f"{place} is no valid JSON: {reason}; mend or remove the line") from None
    if not isinstance(row, dict):
        raise ShardSetupError(f"{place} must be a JSON object, but is {shown(row)}")
    return cast("dict[str, Any]", row)


def _reason(error: Exception) -> str:
    """Without the path, which the message has already."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

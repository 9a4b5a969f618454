"""Checking, stamping and grouping the rows of a batch. Pure: plain values in, plain values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..broker.errors import RouteError, RowError, RowTypeError
from ..broker.keys import ANY_ROUTE
from ..broker.routes import route_of

Row = dict[str, Any]
_ONLY_DICTS: set[type] = {dict}


@dataclass(slots=True)
class PromptGroup:
    """`num_generations` contiguous rows of one prompt; `index` counts groups over the whole batch, `first_row` rows."""

    index: int
    first_row: int
    route: str
    shard: str
    rows: Sequence[Row]


def stamp_row_indices(rows: Sequence[Row]) -> Sequence[Row]:
    """Stamp `_rowidx` 0..N-1 over the whole batch, in place, before anything is routed; returns the same rows."""
    for index, row in enumerate(rows):
        row["_rowidx"] = index
    return rows


def check_places(rows: Sequence[Row]) -> None:
    """Whether rows of a batch that was published before, which may have been read from a file again, can stand where
    they stand; nothing is changed.

    Raises `RowError` where one stands twice, and where they say themselves that they are in another order.
    """
    _require_own_places(rows)
    for index, row in enumerate(rows):
        said = row.get("_rowidx", index)
        if type(said) is not int or said != index:
            raise RowError(
                f"row {index} says that it is row {said!r}; give the rows in the order in which they were published"
            )


def own_rows(rows: object) -> list[Row]:
    """The rows in a list of our own: the caller may reorder, refill or empty his as soon as he has his batch. The dicts
    stay his.

    Raises `RowTypeError` for what is no list of dicts.
    """
    _check_sequence(rows)
    mine = list(cast("Sequence[Any]", rows))
    if not set(map(type, mine)) <= _ONLY_DICTS:
        for index, row in enumerate(mine):
            _check_dict(index, row)
    return mine


def _check_sequence(rows: object) -> None:
    # Text is a sequence too, and an array's slices and truth are not those of a list.
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise RowTypeError(f"the rows are a {type(rows).__name__}; give a list of dicts")


def check_num_generations(value: object) -> None:
    """Refuse what cannot be a number of rows per group."""
    if type(value) is not int:
        raise RowTypeError(f"num_generations must be an integer, but is {value!r}")
    if value <= 0:
        raise RowError(f"num_generations must be at least 1, but is {value}")


def check_rows(rows: Sequence[Any], num_generations: int) -> None:
    """Raise `RowError` or `RowTypeError` for a batch that cannot be published; nothing is changed."""
    check_num_generations(num_generations)
    _check_sequence(rows)
    if not rows:
        raise RowError("the batch is empty; give at least one row")
    if len(rows) % num_generations:
        raise RowError(
            f"{len(rows)} rows are no multiple of num_generations={num_generations}; each prompt needs all its "
            f"generations, the last group has {len(rows) % num_generations}"
        )
    if not _look_right(rows):
        for index, row in enumerate(rows):
            _check_row(index, row)
    _require_own_places(rows)


def _look_right(rows: Sequence[Any]) -> bool:
    """A quick look at all rows: nothing is published, and no result comes, before the last one was checked."""
    if set(map(type, rows)) != _ONLY_DICTS:
        return False
    return {type(row.get("responses_create_params")) for row in rows} == _ONLY_DICTS


def _require_own_places(rows: Sequence[Any]) -> None:
    if len(set(map(id, rows))) == len(rows):
        return
    seen: dict[int, int] = {}
    for index, row in enumerate(rows):
        if (first := seen.setdefault(id(row), index)) != index:
            raise RowError(
                f"rows {first} and {index} are one and the same dict, and each row is stamped with its own index; "
                "give each its own copy"
            )


def _check_dict(index: int, row: object) -> None:
    if not isinstance(row, dict):
        raise RowTypeError(f"row {index} is a {type(row).__name__}; each row must be a dict")


def _check_row(index: int, row: Any) -> None:
    _check_dict(index, row)
    if "responses_create_params" not in row:
        raise RowTypeError(f"row {index} lacks responses_create_params; give it a dict with at least an input")
    params = cast("Row", row)["responses_create_params"]
    if not isinstance(params, dict):
        raise RowTypeError(f"row {index}: responses_create_params must be a dict, but is a {type(params).__name__}")


def plan_groups(rows: Sequence[Row], route_map: Mapping[str, str], num_generations: int) -> list[PromptGroup]:
    """Cut checked rows into groups, in input order, each with its route and shard.

    Raises `RouteError` for a row without a route, a group that mixes routes, and a route that nobody hosts.
    """
    refs, sources = [row.get("agent_ref") for row in rows], [row.get("task_source") for row in rows]
    groups: list[PromptGroup] = []
    for index, first in enumerate(range(0, len(rows), num_generations)):
        end = first + num_generations
        members = rows[first:end]
        alike = (
            refs[first:end].count(refs[first]) == num_generations
            and sources[first:end].count(sources[first]) == num_generations
        )
        route = route_of_row(members[0], first) if alike else _common_route(members, first)
        groups.append(PromptGroup(index, first, route, shard_of(route, route_map, first), members))
    return groups


def begins_with_mixed_prompts(rows: Sequence[Row], num_generations: int) -> bool:
    """Whether the first group's rows have different inputs: rows that were not repeated, or not side by side."""
    first, *others = [row["responses_create_params"].get("input") for row in rows[:num_generations]]
    try:
        return any(other is not first and other != first for other in others)
    except (TypeError, ValueError, RuntimeError):
        # Arrays in them do not tell by `!=`.
        return False


def route_of_row(row: Row, index: int) -> str:
    """`route_of` with an error that names the row."""
    try:
        return route_of(row)
    except RouteError as error:
        raise RouteError(f"row {index}: {error}") from None


def _common_route(rows: Sequence[Row], first: int) -> str:
    routes = [route_of_row(row, first + at) for at, row in enumerate(rows)]
    if any(route != routes[0] for route in routes):
        raise RouteError(
            f"the group that begins at row {first} mixes routes: {', '.join(sorted(set(routes)))}; all rows of a "
            "prompt group must go to the same route, because its verifier may compare them. Give the "
            f"{len(rows)} rows of each prompt side by side"
        )
    return routes[0]


def shard_of(route: str, route_map: Mapping[str, str], row: int) -> str:
    """The shard that hosts `route`; raises `RouteError` naming what is hosted. An unsharded map hosts every route."""
    shard = route_map.get(route) or route_map.get(ANY_ROUTE)
    if shard is None:
        hosted = ", ".join(sorted(route_map)) or "none"
        raise RouteError(
            f"row {row}: no shard hosts the route {route!r}; hosted: {hosted}. Check the row's agent_ref.name or "
            "task_source, or add the entry to a shard"
        )
    return shard


def bucket_groups_by_shard(
    rows: Sequence[Row], route_map: Mapping[str, str], num_generations: int
) -> dict[str, list[Sequence[Row]]]:
    """Groups by shard, `{shard: [group, …]}`, shards in the order of their first use, groups in input order.

    Raises as `check_rows` and `plan_groups` do.
    """
    check_rows(rows, num_generations)
    buckets: dict[str, list[Sequence[Row]]] = {}
    for group in plan_groups(rows, route_map, num_generations):
        buckets.setdefault(group.shard, []).append(group.rows)
    return buckets

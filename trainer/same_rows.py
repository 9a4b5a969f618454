"""Whether the rows that come back with a batch are those that it was published with. Results are paired with them by
position, so that rows in another order would be trained on with others' results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ..broker.errors import UsageError
from ..producer import PromptGroup, checksum, encode_group, route_of_row

# Packing them takes as long as publishing did, and the client has other things to do meanwhile.
_AT_ONCE = 4


async def require_same_rows(batch: str, groups: Sequence[PromptGroup], published: Mapping[int, str]) -> None:
    """Raise `UsageError` for the first group that is another one than was published. `published` has the checksum of
    each, as far as the broker knows it.
    """
    _require_same_routes(batch, groups)
    for group in groups:
        if group.index in published and checksum(encode_group(batch, group)) != published[group.index]:
            last = group.first_row + len(group.rows) - 1
            raise UsageError(
                f"rows {group.first_row} to {last} of batch {batch} are not what was published: something in them "
                "or the order of its keys changed, or they are in another order. Give the rows as they were built "
                "then, or give none and tell results by their index"
            )
        if not group.index % _AT_ONCE:
            await asyncio.sleep(0)


def _require_same_routes(batch: str, groups: Sequence[PromptGroup]) -> None:
    """Also where the broker has no checksums; and it names the row."""
    for group in groups:
        for index, row in enumerate(group.rows, start=group.first_row):
            if (given := route_of_row(row, index)) != group.route:
                raise UsageError(
                    f"row {index} of batch {batch} was published for route {group.route!r}, and the row given goes to "
                    f"{given!r}; give the rows it was published with, in the same order, or none"
                )

"""The producer: checks a batch, stamps `_rowidx`, cuts prompt groups, routes them, publishes them."""

from ..broker.routes import route_of
from .publishing import CHECKSUM_LENGTH, Producer, Publication, checksum, encode_group
from .route_map import RouteMap, read_route_map, wait_for_route_map
from .rows import (
    PromptGroup,
    begins_with_mixed_prompts,
    bucket_groups_by_shard,
    check_places,
    check_rows,
    own_rows,
    plan_groups,
    route_of_row,
    stamp_row_indices,
)

__all__ = [
    "CHECKSUM_LENGTH",
    "Producer",
    "PromptGroup",
    "Publication",
    "RouteMap",
    "begins_with_mixed_prompts",
    "bucket_groups_by_shard",
    "check_places",
    "check_rows",
    "checksum",
    "encode_group",
    "own_rows",
    "plan_groups",
    "read_route_map",
    "route_of",
    "route_of_row",
    "stamp_row_indices",
    "wait_for_route_map",
]

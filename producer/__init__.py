"""The producer: checks a batch, stamps `_rowidx`, cuts prompt groups, routes them, publishes them."""

from ..broker.routes import route_of
from .publishing import Producer, Publication
from .route_map import RouteMap, read_route_map, wait_for_route_map
from .rows import PromptGroup, bucket_groups_by_shard, check_rows, own_rows, plan_groups, stamp_again, stamp_row_indices

__all__ = [
    "Producer",
    "PromptGroup",
    "Publication",
    "RouteMap",
    "bucket_groups_by_shard",
    "check_rows",
    "own_rows",
    "plan_groups",
    "read_route_map",
    "route_of",
    "stamp_again",
    "stamp_row_indices",
    "wait_for_route_map",
]

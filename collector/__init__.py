"""The collector: merges result streams in completion order, puts rows back into whole groups, rolls timings up."""

from .accumulator import MissingRowsError, PromptGroupAccumulator
from .collection import BatchCollection, Sink
from .groups import CompletedGroup, GroupFailure, Origin, PackedGroup, PackedRow
from .merging import SourceFailedError, merge_shard_streams
from .reader import Collector
from .timing import merge_timing_metrics

__all__ = [
    "BatchCollection",
    "Collector",
    "CompletedGroup",
    "GroupFailure",
    "MissingRowsError",
    "Origin",
    "PackedGroup",
    "PackedRow",
    "PromptGroupAccumulator",
    "Sink",
    "SourceFailedError",
    "merge_shard_streams",
    "merge_timing_metrics",
]

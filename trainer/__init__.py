"""What a trainer imports: the client, and what it gives."""

from ..collector import CompletedGroup, GroupFailure, Origin
from .batch import Batch
from .client import RolloutClient
from .nemo_rl import NemoRLEnvironment
from .session import BatchCounts

__all__ = ["Batch", "BatchCounts", "CompletedGroup", "GroupFailure", "NemoRLEnvironment", "Origin", "RolloutClient"]

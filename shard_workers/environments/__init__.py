"""What turns rows into scored rollouts: the contract, the registry, and the environments that ship with
rolloutbus.
"""

from __future__ import annotations

from .base import Environment
from .functions import RolloutContext
from .group_barrier import GroupBrokenError
from .policy import Policy
from .registry import load_environment

__all__ = ["Environment", "GroupBrokenError", "Policy", "RolloutContext", "load_environment"]

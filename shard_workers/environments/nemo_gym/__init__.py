"""The `nemo_gym` environment: the servers of NVIDIA NeMo Gym, in a process tree of their own.

`environment` is the worker's side, `host` runs Gym, `supervisor` guards the tree, `versions` holds all that touches
Gym's own API.
"""

from __future__ import annotations

from .environment import NemoGymEnvironment

__all__ = ["NemoGymEnvironment"]

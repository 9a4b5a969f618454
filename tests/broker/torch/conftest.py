"""Leaves these tests uncollected, rather than skipped, where torch is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_codec_torch.py"]

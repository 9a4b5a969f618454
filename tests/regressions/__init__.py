"""Faults that users of other systems reported, each with a test of its own; a docstring is the post-mortem."""

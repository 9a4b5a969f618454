"""Placeholder until its first piece lands."""

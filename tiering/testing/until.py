"""Waiting for a condition in a test, instead of for some time."""

from tiering.testing.clock import until

__all__ = ["until"]

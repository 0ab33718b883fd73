"""Waiting for a condition in a test, instead of for a fixed time."""

from tiering.testing.clock import until

__all__ = ["until"]

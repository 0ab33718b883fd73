"""The stores of an engine's tier that wait for the next service."""

from __future__ import annotations

import math

from tiering.api.keys import OffloadKey

HOLD_SECONDS = 30.0
"""Seconds for which blocks wait for the next service after one that took stores has ended."""


class HeldStores:
    """Decides how long blocks wait for a service, and has those whose stores one did not report."""

    def __init__(self) -> None:
        self.unreported: list[OffloadKey] = []
        """Blocks of stores that a service did not report before its end."""
        self._until = -math.inf

    def begin(self, now: float, *, stored: bool) -> None:
        """Let blocks wait from now on, if the service whose connection has ended took stores."""
        if stored:
            self._until = now + HOLD_SECONDS

    def wait(self, now: float) -> bool:
        """Return True if blocks wait in the manager's queue, which does not keep their rows from other blocks."""
        return now < self._until

    def take(self) -> list[OffloadKey]:
        """Return the blocks to offer to the next service."""
        keys, self.unreported = self.unreported, []
        return keys

    def drop(self) -> None:
        """Let nothing wait, because the blocks are invalid."""
        self.unreported, self._until = [], -math.inf

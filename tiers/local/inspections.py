"""The inspections of a local tier's directory: when they are due, and their task on the I/O side."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiering.tier import Chore, RateLimit
from tiers.local.store import Inspection, LocalParts

logger = logging.getLogger("kv_tiering.local")

INSPECT_SECONDS = 10.0
"""Seconds between two inspections of the directory while blocks are stored."""

INSPECT_AT_ONCE_SECONDS = 1.0
"""Seconds from an inspection to the next one after a failed store."""

_LOG_PERIOD = 30.0


class Inspections(Chore):
    """Compares the directory of one tier with the open store.

    Args:
        parts: parts of the tier.
        examine: receives the differences.
    """

    def __init__(self, parts: LocalParts, examine: Callable[[Inspection], object]) -> None:
        super().__init__("inspect", parts.io, parts.clock, lambda: self.run(parts.store.inspect, self._ended))
        self._name = parts.name
        self._examine = examine
        self._at = float("-inf")
        self._lines = RateLimit(_LOG_PERIOD, parts.clock)

    def want(self) -> None:
        """Inspect the directory in the ordinary time after the last inspection, or now if that has passed."""
        self.due = min(self.due, self._at + INSPECT_SECONDS)

    def hurry(self, *, now: bool = False) -> None:
        """Inspect the directory soon after the last inspection, for a reason.

        Args:
            now: do not wait after the last inspection; default: False.
        """
        self.due = min(self.due, self._at + (0.0 if now else INSPECT_AT_ONCE_SECONDS))

    def note(self) -> None:
        """Note that another task has inspected the directory now."""
        self._at = self._clock()

    def _ended(self, inspection: Inspection | None, error: BaseException | None) -> None:
        self.note()
        if inspection is not None:
            self._examine(inspection)
            return
        if count := self._lines.admit():
            logger.warning("tier %s: %s (%d such failure(s)); it is tried again", self._name, error, count)
        self.want()

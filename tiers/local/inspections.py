"""The inspections of a local tier's directory: when they are due, and their task on the I/O side."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.io.messages import IoTask
from tiering.secondary.io.side import IoSide
from tiers.local.store import Inspection, LocalStore

logger = logging.getLogger("kv_tiering.local")

INSPECT_SECONDS = 10.0
"""Seconds between two inspections of the directory while blocks are stored."""

INSPECT_AT_ONCE_SECONDS = 1.0
"""Seconds from an inspection to the next one after a failed store."""

_LOG_PERIOD = 30.0


class Inspections:
    """Compares the directory of one tier with the open store.

    Args:
        name: the tier's name, for log lines.
        store: the tier's store.
        io: runs the task.
        clock: returns monotonic seconds.
        examine: receives the differences.
    """

    def __init__(
        self,
        name: str,
        store: LocalStore,
        io: IoSide,
        clock: Callable[[], float],
        examine: Callable[[Inspection], object],
    ) -> None:
        self.running = False
        """True while an inspection is running."""
        self.wanted = False
        """True asks for an inspection in the ordinary time after the last one, or now if that has passed."""
        self._name = name
        self._store = store
        self._io = io
        self._clock = clock
        self._examine = examine
        self._at = float("-inf")
        """Time of the last inspection."""
        self.due = float("inf")
        """Time of the next inspection, in monotonic seconds."""
        self._lines = RateLimit(_LOG_PERIOD, clock)

    def hurry(self, *, now: bool = False) -> None:
        """Inspect the directory soon after the last inspection, for a reason.

        Args:
            now: do not wait after the last inspection; default: False.
        """
        self._want(0.0 if now else INSPECT_AT_ONCE_SECONDS)

    def tick(self) -> None:
        """Start an inspection that is due."""
        if self.wanted:
            self.wanted = False
            self._want(INSPECT_SECONDS)
        if self._clock() >= self.due:
            self.start()

    def start(self) -> None:
        """Start an inspection, unless one is running."""
        if self.running:
            return
        self.running = True
        self.due = float("inf")
        self._io.run(IoTask("inspect", self._store.inspect, self._ended))

    def note(self) -> None:
        """Note that another task has inspected the directory now."""
        self._at = self._clock()

    def _want(self, within: float) -> None:
        self.due = min(self.due, max(self._clock(), self._at + within))

    def _ended(self, inspection: Inspection | None, error: BaseException | None) -> None:
        self.running = False
        self.note()
        if inspection is not None:
            self._examine(inspection)
            return
        if count := self._lines.admit():
            logger.warning("tier %s: %s (%d such failure(s)); it is tried again", self._name, error, count)
        self.wanted = True

"""One log line per event that a person can act on, not one per block: a limit on how often a line is written."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RateLimit:
    """Lets one line through per ``period`` seconds and counts those it holds back.  Any thread may call."""

    def __init__(self, period: float, clock: Callable[[], float]) -> None:
        self._period = period
        self._clock = clock
        self._next = float("-inf")
        self._held_back = 0
        self._lock = threading.Lock()

    def admit(self, events: int = 1) -> int:
        """How many events the line should speak of, those held back before included; 0: write no line now."""
        with self._lock:
            total = self._held_back + events
            now = self._clock()
            if now < self._next:
                self._held_back = total
                return 0
            self._next = now + self._period
            self._held_back = 0
            return total

"""Rate limits of log lines: one line per event that a person can act on, not one per block."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

WARNING_PERIOD = 10.0
"""Seconds between two log lines of one kind."""


class RateLimit:
    """A limit of one line per period, with a count of the events that were held back. Any thread may call.

    Args:
        period: minimum time between two lines, in seconds.
        clock: monotonic clock in seconds.
    """

    def __init__(self, period: float, clock: Callable[[], float]) -> None:
        self._period = period
        self._clock = clock
        self._next = float("-inf")
        self._held_back = 0
        self._lock = threading.Lock()

    def admit(self, events: int = 1) -> int:
        """Return the number of events that the line should report, or 0 if no line is due.

        The number includes the events that were held back before.
        """
        with self._lock:
            total = self._held_back + events
            now = self._clock()
            if now < self._next:
                self._held_back = total
                return 0
            self._next = now + self._period
            self._held_back = 0
            return total


class LimitedWarning:
    """One kind of warning, with at most one log line per :data:`WARNING_PERIOD`.

    A line says how many events it stands for.

    Args:
        logger: receives the lines.
        clock: returns monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._limit = RateLimit(WARNING_PERIOD, clock)

    def __call__(self, message: str, *args: object) -> None:
        events = self._limit.admit()
        if events > 1:
            message += f" ({events} times since the last line)"
        if events:
            self._logger.warning(message, *args)

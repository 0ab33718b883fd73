"""Rate-limited warnings."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiering.runtime.ratelimit import RateLimit

WARNING_PERIOD = 10.0
"""Seconds between two log lines of one kind."""


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

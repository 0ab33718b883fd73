"""Warnings that do not flood the log."""

from __future__ import annotations

import logging
from collections.abc import Callable


class LimitedWarning:
    """One kind of warning: at most one line per ``interval`` seconds, which says how many were left out since the last."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], interval: float = 10.0) -> None:
        self._logger = logger
        self._clock = clock
        self._interval = interval
        self._next_at = float("-inf")
        self._left_out = 0

    def __call__(self, message: str, *args: object) -> None:
        now = self._clock()
        if now < self._next_at:
            self._left_out += 1
            return
        self._next_at = now + self._interval
        if self._left_out:
            message += f" ({self._left_out} more like this since the last line)"
        self._left_out = 0
        self._logger.warning(message, *args)

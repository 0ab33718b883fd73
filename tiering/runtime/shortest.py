"""The shortest one of the latest durations, by which a part that is always there is known."""

from __future__ import annotations

import math


class Shortest:
    """Shortest duration of the present period and of the one before.

    Args:
        period: length of a period in seconds.
        now: present time, in monotonic seconds.
    """

    __slots__ = ("_before", "_ends", "_newest", "_period")

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._ends = now + period
        self._newest = self._before = math.inf

    def add(self, seconds: float, now: float) -> None:
        """Record a duration."""
        self._roll(now)
        self._newest = min(self._newest, seconds)

    def value(self, now: float) -> float:
        """Return the shortest duration; infinity if there was none."""
        self._roll(now)
        return min(self._newest, self._before)

    def _roll(self, now: float) -> None:
        if now >= self._ends:
            self._before = self._newest if now < self._ends + self._period else math.inf
            self._newest, self._ends = math.inf, now + self._period

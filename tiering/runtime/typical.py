"""The typical duration of late, which falls towards the shortest while none is measured."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from tiering.runtime.shortest import Shortest

LATEST = 5
"""Number of durations whose median counts: two of them may be outliers."""

MOST_TIMES = 3.0
"""Largest quotient of the typical and the shortest duration; more is a queue for example."""


class Typical:
    """Median of the latest durations, beside the shortest one.

    Who acts by a long duration may measure no further one. So what the median has beyond the shortest one fades.

    Args:
        period: length of a period of the shortest duration in seconds.
        half_life: seconds after which half of the difference is left.
        now: present time, in monotonic seconds.
    """

    __slots__ = ("_half_life", "_latest", "_median", "_shortest", "_time")

    def __init__(self, period: float, half_life: float, now: float) -> None:
        self._shortest = Shortest(period, now)
        self._half_life = half_life
        self._latest = deque[float](maxlen=LATEST)
        self._median = 0.0
        self._time = now

    def add(self, seconds: float, now: float) -> None:
        """Record a duration."""
        self._shortest.add(seconds, now)
        self._latest.append(seconds)
        self._median, self._time = median(self._latest), now

    def value(self, now: float) -> float:
        """Return the typical duration; infinity if there was none lately."""
        shortest = self._shortest.value(now)
        beyond = max(0.0, min(self._median, MOST_TIMES * shortest) - shortest)
        return shortest + beyond * math.pow(0.5, (now - self._time) / self._half_life)

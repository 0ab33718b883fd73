"""Moving share of the time in which something works, such as a tier that loads."""

from __future__ import annotations

import math


class TimeShare:
    """Share of the latest time that work takes.

    The weights of all times fade. Before the start, there is no time, so that a young estimate is not too small.

    Args:
        half_life: seconds after which half of the weight of a time has faded.
        most: largest share.
        now: present time, in monotonic seconds.
    """

    __slots__ = ("_busy", "_carried", "_followed", "_half_life", "_most", "_until", "value")

    def __init__(self, half_life: float, most: float, now: float) -> None:
        self._half_life = half_life
        self._most = most
        self._until = now
        self._busy = self._carried = self._followed = 0.0
        self.value = 0.0
        """The share at the last work, from 0 to the largest one."""

    def add(self, seconds: float, now: float) -> None:
        """Record that ``seconds`` of the time since the last call were work.

        Of several calls at the same time, all count with the next one.
        """
        seconds += self._carried
        since = now - self._until
        self._carried = 0.0 if since > 0.0 else seconds
        if since <= 0.0:
            return
        self._until = now
        new = -math.expm1(since * math.log(0.5) / self._half_life)  # exact, so that the sum is never 0
        self._followed += new * (1.0 - self._followed)
        self._busy = min(self._most * self._followed, self._busy + new * (min(1.0, seconds / since) - self._busy))
        self.value = self._busy / self._followed

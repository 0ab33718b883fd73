"""The credit of a tier: the number of blocks that it takes now, enough to keep its medium busy."""

from __future__ import annotations

from collections.abc import Callable

STORE_SHARE = 0.5
"""Largest share of the primary rows that the stores of one tier may use."""

SHORTEST_WINDOW = 0.01
"""Shortest time over which the rate of the medium is measured, in seconds."""

FADING = 0.1
"""Share by which a lower rate replaces the one measured before; a higher rate replaces it at once."""


class StoreCredit:
    """Number of blocks that a medium ends in a given time, from those that it has ended lately.

    A medium that ends all its blocks within a step gets more of them in the next one: the number doubles until it is
    the medium that sets the pace.

    Args:
        least: returns the number of blocks that keep all places of the medium busy.
        num_rows: number of primary rows.
        clock: returns monotonic seconds.
    """

    __slots__ = ("_began", "_clock", "_ended", "_least", "_most", "_rate")

    def __init__(self, least: Callable[[], int], num_rows: int, clock: Callable[[], float]) -> None:
        self._least = least
        self._most = max(1, int(STORE_SHARE * num_rows))
        self._clock = clock
        self._began = clock()
        self._ended = 0
        self._rate = 0.0

    def ended(self, blocks: int) -> None:
        """Record that the stores of ``blocks`` blocks have ended."""
        self._ended += blocks

    def limit(self, seconds: float) -> int:
        """Return the number of blocks that may be with the medium, so that it is busy for ``seconds``."""
        now = self._clock()
        window = now - self._began
        if window >= SHORTEST_WINDOW:
            rate = self._ended / window
            self._rate = max(rate, self._rate + FADING * (rate - self._rate))
            self._began, self._ended = now, 0
        return min(self._most, max(1, self._least(), int(self._rate * seconds)))

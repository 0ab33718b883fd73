"""The prefixes that requests used lately, and the times at which they are published."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from tiering.api.keys import OffloadKey

MOST_USES = 1 << 17
"""Largest number of uses of keys, the last ones, from which the hottest are chosen."""

PUBLISH_SECONDS = 30.0
"""Time from the first use that is not published to the next publication.

A publication replaces the one before, and that of the owner's earlier life may have far more prefixes.
"""

REFRESH_SECONDS = 300.0
"""Time after which a publication is repeated though nothing has changed, because publications expire."""


class HotPrefixes:
    """Prefixes in the order of their use, the last :data:`MOST_USES` keys of them."""

    def __init__(self) -> None:
        self._chains: deque[Sequence[OffloadKey]] = deque()
        self._uses = 0
        self._changed = False
        self._due = math.inf

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Record that a request used a prefix, which is not changed any more."""
        self._chains.append(keys[:MOST_USES])
        self._uses += len(self._chains[-1])
        while self._uses > MOST_USES:
            self._uses -= len(self._chains.popleft())
        self._changed = True

    def is_due(self, now: float) -> bool:
        """Return True if the prefixes are to be published at ``now``, in seconds of a monotonic clock.

        The first call after a use begins the time to its publication.
        """
        if self._changed:
            self._due = min(self._due, now + PUBLISH_SECONDS)
        return now >= self._due

    def take(self, now: float) -> tuple[Sequence[OffloadKey], ...]:
        """Return the prefixes for a publication at ``now``, the most recent one last."""
        self._changed, self._due = False, now + REFRESH_SECONDS if self._chains else math.inf
        return tuple(self._chains)

    def clear(self) -> None:
        """Drop all prefixes."""
        self._chains.clear()
        self._uses, self._changed, self._due = 0, False, math.inf

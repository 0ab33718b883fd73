"""Budget of the bytes of stores that may wait or run in one tier.

A tier that cannot keep up drops stores instead of pinning rows of the primary tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from operator import itemgetter

from tiering.api.keys import OffloadKey

_LAST_BYTE = itemgetter(-1)


class StoreBudget:
    """Counts the raw bytes of stores in flight.

    Args:
        group_bytes: bytes of one block of each KV-cache group.
        limit: maximum bytes of stores in flight.
    """

    def __init__(self, group_bytes: tuple[int, ...], limit: int) -> None:
        self._group_bytes = group_bytes
        self._limit = limit
        self.used = 0
        """Raw bytes of the stores in flight."""

    def sizes(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the raw bytes of each block."""
        if len(self._group_bytes) == 1:
            return list(self._group_bytes) * len(keys)
        # The last byte of a key is its group: an engine has a few, never more than 256.
        return list(map(self._group_bytes.__getitem__, map(_LAST_BYTE, keys)))

    def spare(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading ``keys`` fit into the first half of the budget.

        The other half is for newly stored blocks. With nothing in flight, one block always fits.
        """
        room = self._limit // 2 - self.used
        return len(list(takewhile(room.__ge__, accumulate(self.sizes(keys))))) or int(bool(keys) and not self.used)

    def fitting(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading ``keys`` fit into the budget.

        A prefix without its tail is of use, a tail without its head is not. With nothing in flight one block always
        fits, however small the limit is.
        """
        room = self._limit - self.used
        sizes = self.sizes(keys)
        if sum(sizes) <= room:
            return len(keys)
        fitting = len(list(takewhile(room.__ge__, accumulate(sizes))))
        return fitting or int(not self.used)

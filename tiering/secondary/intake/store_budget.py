"""How many bytes of stores may wait or run: a tier that cannot keep up drops stores rather than pin the primary tier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from operator import itemgetter

from tiering.api.keys import OffloadKey

_LAST_BYTE = itemgetter(-1)


class StoreBudget:
    """Counts the raw bytes of stores in flight against ``limit`` bytes.  ``group_bytes[g]``: bytes of a block of group g."""

    def __init__(self, group_bytes: tuple[int, ...], limit: int) -> None:
        self._group_bytes = group_bytes
        self._limit = limit
        self.used = 0

    def sizes(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Raw bytes of each block."""
        if len(self._group_bytes) == 1:
            return list(self._group_bytes) * len(keys)
        # The last byte of a key is its group: an engine has a few, never more than 256.
        return list(map(self._group_bytes.__getitem__, map(_LAST_BYTE, keys)))

    def spare(self, keys: Sequence[OffloadKey]) -> int:
        """How many leading ``keys`` there is room for in the first half of the budget: the other is for what is newly stored."""
        room = self._limit // 2 - self.used
        return len(list(takewhile(room.__ge__, accumulate(self.sizes(keys))))) or int(bool(keys) and not self.used)

    def fitting(self, keys: Sequence[OffloadKey]) -> int:
        """How many leading ``keys`` there is room for: a prefix without its tail is of use, a tail without its head is not.

        With nothing in flight there is room for one block, however small the limit is.
        """
        room = self._limit - self.used
        sizes = self.sizes(keys)
        if sum(sizes) <= room:
            return len(keys)
        fitting = len(list(takewhile(room.__ge__, accumulate(sizes))))
        return fitting or int(not self.used)

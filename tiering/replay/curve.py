"""The hit rate of one LRU cache by its capacity, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiering.advisor.shards import Shards
from tiering.replay.trace import Hashes

SAMPLE = 1 << 16
"""Number of keys from which the curve is estimated; exact for traces with fewer distinct blocks."""

_SHIFT = np.uint64(32)


class LruCurve:
    """LRU's hit rate at capacities that are known beforehand.

    Args:
        capacities: capacities in blocks.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._shards = Shards(capacities, SAMPLE)

    def add(self, hashes: Hashes) -> None:
        """Record the accesses of one request."""
        self._shards.accesses += len(hashes)
        high = hashes >> _SHIFT
        self._shards.access(high[high < np.uint64(self._shards.threshold)].tolist())

    def hit_rate(self, capacity: int) -> float:
        """Return the hit rate at one of the capacities."""
        return self._shards.hit_rate(capacity)

    @property
    def total(self) -> int:
        """Number of accesses so far."""
        return self._shards.accesses

    @property
    def distinct(self) -> int:
        """Number of distinct blocks, estimated if they are more than the sample."""
        return round(self._shards.keys / self._shards.rate)

    @property
    def reuse(self) -> float:
        """Share of the accesses to blocks that came before: the hit rate of an unlimited cache."""
        return max(0.0, 1.0 - self.distinct / self.total) if self.total else 0.0

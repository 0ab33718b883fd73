"""Bounds on the hit rate of a trace by capacity: LRU's curve and Belady's optimum, in bounded memory.

Up to :data:`MAX_ACCESSES` accesses, the result is exact. Of a longer trace, a sample of the keys is kept with all their
accesses, and the capacity is scaled with the sampling rate (miniature simulation, Waldspurger et al., ATC 2017).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from tiering.advisor.shards import Shards
from tiering.replay.trace import Hashes

MAX_ACCESSES = 1 << 21
"""Largest number of accesses that are kept."""
CURVE_SAMPLE = 1 << 16
"""Number of keys from which LRU's curve is estimated; exact for traces with fewer distinct blocks."""

_SHIFT = np.uint64(32)
_NEVER = np.iinfo(np.int64).max


class Bounds:
    """LRU's hit rate and the largest possible hit rate, at capacities that are known beforehand.

    Args:
        capacities: capacities in blocks, for LRU's curve.
        max_accesses: largest number of accesses to keep for the optimum; default :data:`MAX_ACCESSES`.
    """

    def __init__(self, capacities: Sequence[int], max_accesses: int = MAX_ACCESSES) -> None:
        self._lru = Shards(capacities, CURVE_SAMPLE)
        self._accesses: Hashes = np.empty(max_accesses, np.uint64)
        self._count = 0
        self._sampled_below = 1.0
        self.total = 0
        """Number of accesses so far."""

    def add(self, hashes: Hashes) -> None:
        """Record the accesses of one request."""
        self.total += len(hashes)
        self._lru.accesses += len(hashes)
        high = hashes >> _SHIFT
        self._lru.access(high[high < np.uint64(self._lru.threshold)].tolist())
        if self._sampled_below < 1.0:
            hashes = hashes[self._is_sampled(hashes)]
        while self._count + len(hashes) > len(self._accesses):
            self._sampled_below /= 2
            kept = self._accesses[: self._count]
            kept = kept[self._is_sampled(kept)]
            self._accesses[: len(kept)] = kept
            self._count = len(kept)
            hashes = hashes[self._is_sampled(hashes)]
        self._accesses[self._count : self._count + len(hashes)] = hashes
        self._count += len(hashes)

    def _is_sampled(self, hashes: Hashes) -> NDArray[np.bool_]:
        # The low half of a hash, which is independent of the half that chooses keys for LRU's curve.
        chosen: NDArray[np.bool_] = (hashes & np.uint64(0xFFFFFFFF)) < np.uint64(int(self._sampled_below * 2**32))
        return chosen

    def lru(self, capacity: int) -> float:
        """Return LRU's hit rate at one of the capacities."""
        return self._lru.hit_rate(capacity)

    @property
    def distinct(self) -> int:
        """Number of distinct blocks, estimated for long traces."""
        return int(len(np.unique(self._accesses[: self._count])) / self._sampled_below)

    @property
    def reuse(self) -> float:
        """Share of the accesses to blocks that came before: the hit rate of an unlimited cache."""
        if not self._count:
            return 0.0
        return 1.0 - len(np.unique(self._accesses[: self._count])) / self._count

    def ideal(self, capacity: float) -> float:
        """Return the largest hit rate that a cache of ``capacity`` blocks could have (Belady's optimum).

        The cache knows the future, and need not keep a block that it has just served. Only whole prefixes are of use
        to an engine, so no policy exceeds this rate.
        """
        accesses = self._accesses[: self._count]
        if math.isinf(capacity) or not self._count:
            return self.reuse
        return optimal_hits(accesses, max(1, round(capacity * self._sampled_below))) / self._count


def next_uses(accesses: Hashes) -> NDArray[np.int64]:
    """Return for each access the position of the key's next access; a huge number if there is none."""
    order = np.argsort(accesses, kind="stable")
    ordered = accesses[order]
    result = np.full(len(accesses), _NEVER, np.int64)
    same = ordered[1:] == ordered[:-1]
    result[order[:-1][same]] = order[1:][same]
    return result


def optimal_hits(accesses: Hashes, capacity: int) -> int:
    """Return the number of hits of Belady's optimal policy with bypass.

    Args:
        accesses: keys in the order of their accesses.
        capacity: number of keys that the cache holds.
    """
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for key, use in zip(accesses.tolist(), next_uses(accesses).tolist(), strict=True):
        if key in held:
            hits += 1
            if use == _NEVER:
                del held[key]
                continue
        elif use == _NEVER:
            continue
        held[key] = use
        heappush(farthest, (-use, key))
        while len(held) > capacity:
            latest, victim = heappop(farthest)
            if held.get(victim) == -latest:
                del held[victim]
    return hits

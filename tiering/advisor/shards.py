"""Fixed-size SHARDS: the LRU hit rate at many capacities, from a sample of the accesses.

The algorithm is that of Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS" (FAST 2015),
with another correction of the sampled number of accesses (:meth:`Shards.hit_rate`). A key is sampled if its hash is
below a threshold, so either all accesses of a key are seen or none. The stack distance of an access is the number of
distinct keys since the last access of its key. The distance among the sampled keys, divided by the sampling rate,
estimates the distance among all keys. When the sample exceeds its size, the threshold falls to the largest sampled
hash, and the keys there leave the sample.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappush, heappushpop

import numpy as np
from numpy.typing import NDArray

HASH_BITS = 32
"""Bits of the hash by which a key is in the sample or not."""
HASHES = 1 << HASH_BITS
SAMPLE = 8192
"""Number of keys in the sample; the estimate's mean error is then below one point."""


class Shards:
    """Hit rates of a cache with LRU eviction at given capacities, estimated from sampled accesses.

    Args:
        capacities: capacities in blocks, above 0; the estimate is exact at these while all keys are sampled.
        sample: largest number of keys in the sample; default :data:`SAMPLE`.
        rate: sampling rate at the start, above 0 and at most 1 (default). A lower rate bounds the cost of the first
            accesses.
    """

    __slots__ = (
        "_capacities",
        "_largest",
        "_last",
        "_now",
        "_sample",
        "_times",
        "_weights",
        "accesses",
        "threshold",
        "weight",
    )

    def __init__(self, capacities: Iterable[int], sample: int = SAMPLE, rate: float = 1.0) -> None:
        self._capacities = sorted(set(capacities))
        self._sample = sample
        self.threshold = max(1, min(HASHES, int(rate * HASHES)))
        """Hashes below this value are sampled."""
        self.accesses = 0
        """Number of accesses, sampled or not; a caller of :meth:`access` counts them."""
        self.weight = 0.0
        """Number of accesses that the sampled ones stand for."""
        self._weights = [0.0] * (len(self._capacities) + 1)
        """Accesses that hit at each capacity and not at the next smaller one; the last number: all others."""
        self._now = 0
        self._last: dict[int, int] = {}
        """Sampled hash → time of its last access."""
        self._times: list[int] = []
        """All values of ``_last``, ascending."""
        self._largest: list[int] = []
        """Sampled hashes, negated, as a heap."""

    def halve(self) -> None:
        """Let all accesses so far count half, so that the estimate follows a workload that changes."""
        self._weights = [weight / 2 for weight in self._weights]
        self.weight /= 2
        self.accesses //= 2

    def clear(self) -> None:
        """Forget all keys; the counts stay."""
        self._last.clear()
        self._times.clear()
        self._largest.clear()

    @property
    def rate(self) -> float:
        """Present sampling rate, at most 1."""
        return self.threshold / HASHES

    @property
    def keys(self) -> int:
        """Number of keys in the sample."""
        return len(self._last)

    @property
    def distinct(self) -> int:
        """Number of distinct keys, estimated if they are more than the sample."""
        return round(self.keys / self.rate)

    @property
    def reuse(self) -> float:
        """Share of the accesses to keys that came before: the hit rate of an unlimited cache."""
        return max(0.0, 1.0 - self.distinct / self.accesses) if self.accesses else 0.0

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Count accesses, and record those of sampled keys; the upper half of a hash decides."""
        self.accesses += len(hashes)
        high = hashes >> np.uint64(64 - HASH_BITS)
        self.access(high[high < np.uint64(self.threshold)].tolist())

    def access(self, hashes: Sequence[int], *, counted: bool = True) -> None:
        """Record accesses of sampled keys, in their order.

        Args:
            hashes: hashes below :attr:`threshold`, as it was when they were chosen.
            counted: True (default) if the accesses are lookups whose hits count. False: they only renew the keys.
        """
        count = len(hashes)
        if len(set(hashes)) < count:
            for key in hashes:
                self.access((key,), counted=counted)
            return
        times, before = self._times, list(map(self._last.get, hashes))
        position = 0
        while position < count:
            first, threshold = before[position], self.threshold
            if first is None:
                end = position + 1
                while end < count and before[end] is None:
                    end += 1
                self._enter(hashes[position:end], counted)
                position = end
                continue
            if hashes[position] >= threshold:
                position += 1
                continue
            # Keys that were accessed one after the other, such as those of a prefix, are neighbours in the times, and
            # all have the same distance.
            end = position + 1
            while end < count and before[end] == first + end - position and hashes[end] < threshold:
                end += 1
            place, length, now = bisect_left(times, first), end - position, self._now
            if counted:
                # A cache of c blocks hits if at most c - 1 other keys came since.
                distance = (len(times) - place) * HASHES / self.threshold
                self._count(bisect_left(self._capacities, distance), length)
            del times[place : place + length]
            self._now = now + length
            renewed = range(now + 1, now + length + 1)
            times.extend(renewed)
            self._last.update(zip(hashes[position:end], renewed, strict=True))
            position = end

    def _enter(self, hashes: Sequence[int], counted: bool) -> None:
        """Add distinct keys to the sample, as far as their hashes are still below the threshold."""
        now, last, times, largest = self._now, self._last, self._times, self._largest
        if len(last) + len(hashes) > self._sample:
            self._enter_full(hashes, counted)
            return
        # Nothing leaves the sample here, and the hashes were chosen by the present threshold.
        self._now = now + len(hashes)
        entered = range(now + 1, self._now + 1)
        last.update(zip(hashes, entered, strict=True))
        times.extend(entered)
        for key in hashes:
            heappush(largest, -key)
        if counted:
            self._count(len(self._capacities), len(hashes))

    def _enter_full(self, hashes: Sequence[int], counted: bool) -> None:
        """Add distinct keys to a sample that is full or becomes so.

        A key that does not fit lowers the threshold to the largest sampled hash, whose key leaves the sample.
        """
        now, last, times, largest = self._now, self._last, self._times, self._largest
        threshold, room = self.threshold, self._sample - len(self._last)
        weight = 0.0
        for key in hashes:
            if key >= threshold:
                continue
            weight += HASHES / threshold
            if room:
                room -= 1
                heappush(largest, -key)
            else:
                threshold = -heappushpop(largest, -key)
                if threshold == key:
                    continue
                del times[bisect_left(times, last.pop(threshold))]
            now += 1
            last[key] = now
            times.append(now)
        self._now, self.threshold = now, threshold
        if counted:
            self._weights[-1] += weight
            self.weight += weight

    def _count(self, bucket: int, accesses: int) -> None:
        """Count sampled accesses that hit at the capacity ``bucket``, and not at the next smaller one."""
        weight = accesses * HASHES / self.threshold
        self._weights[bucket] += weight
        self.weight += weight

    def hit_rate(self, capacity: int) -> float:
        """Return the estimated hit rate of a cache of ``capacity`` blocks.

        Args:
            capacity: one of the capacities given at the start; for others, the next smaller one counts.
        """
        total, misses = float(self.accesses or self.weight), self._weights[-1]
        if self.weight <= misses:
            return 0.0
        # Hot keys make the sample stand for too many or too few accesses, so the difference belongs to the hits. The
        # paper counts it as hits at the shortest distance (SHARDS-adj). The hot keys of prompts, however, come again as
        # late as others, after whole prompts, so all hits take their part of the difference.
        hits = sum(self._weights[: bisect_right(self._capacities, capacity)])
        return min(1.0, max(0.0, hits * (total - misses) / (self.weight - misses) / total))

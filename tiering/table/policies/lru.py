"""The eviction policy LRU, least recently used."""

from __future__ import annotations

import numpy as np

from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows
from tiering.table.policies.recency import RecencyLog, StampClock


class LRUEvictionPolicy(EvictionPolicy):
    """A policy that evicts the row whose last use is the oldest."""

    def __init__(self, num_rows: int, refs: RefCounts, keys: RowKeys) -> None:
        super().__init__(num_rows, refs, keys)
        self._clock = StampClock(num_rows)
        self._log = RecencyLog(self._clock, refs)

    def insert(self, rows: Rows) -> None:
        self._log.append(rows)
        self._log.size += len(rows)

    def touch(self, rows: Rows) -> None:
        self._log.append(rows)

    def evict(self, count: int) -> Rows:
        return self._log.take(count)

    def remove(self, rows: Rows) -> None:
        self._log.remove(rows)

    def release(self, rows: Rows) -> None:
        self._log.release(rows)

    def order(self) -> Rows:
        rows, stamps = self._log.live()
        return rows[np.argsort(-stamps)]

    def clear(self) -> None:
        self._clock.stamps[:] = 0
        self._log.clear()

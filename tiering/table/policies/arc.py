"""The eviction policy ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), in batches.

T1 holds rows used once, T2 rows used again; B1 and B2 remember keys evicted from T1 and T2. If a key returns while B1
remembers it, T1 is too small; if B2 remembers it, T1 is too large. ``target`` is the adaptive size of T1. Victims are
taken from T1 as far as T1 exceeds its target, then from T2. If one list has only pinned rows left, the other list
supplies the rest.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from tiering.table.disposal import DISPOSAL
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows
from tiering.table.policies.recency import RecencyLog
from tiering.table.row_array import row_array


class ARCEvictionPolicy(EvictionPolicy):
    """A policy that balances recency and frequency.

    A scan of blocks used once does not flush blocks used often.
    """

    def __init__(self, num_rows: int, refs: RefCounts, keys: RowKeys) -> None:
        super().__init__(num_rows, refs, keys)
        self._t1 = RecencyLog(self.clock, refs)
        self._t2 = RecencyLog(self.clock, refs)
        self._in_t2: NDArray[np.bool_] = row_array(num_rows, np.bool_)
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()
        self.target = 0.0
        """Adaptive size of T1 in rows."""

    def insert(self, rows: Rows) -> None:
        keys = self.keys[rows].tolist()
        known = [key in self._b1 or key in self._b2 for key in keys]
        if not any(known):
            self._add(self._t1, rows)
            return
        for key, ghost in zip(keys, known, strict=True):
            if ghost:
                self._learn(key)
        again = np.array(known)
        self._in_t2[rows[again]] = True
        self._add(self._t2, rows[again])
        self._add(self._t1, rows[~again])

    def touch(self, rows: Rows) -> None:
        again = self._in_t2[rows]
        if not again.all():
            promoted = rows[~again]
            self._t1.detach(promoted)
            self._in_t2[promoted] = True
            self._t2.size += len(promoted)
        self._t2.append(rows)

    def refresh(self, rows: Rows) -> None:
        again = self._in_t2[rows]
        self._t1.append(rows[~again])
        self._t2.append(rows[again])

    def evict(self, count: int) -> Rows:
        excess = self._t1.size - int(self.target)
        first = self._t1.take(min(count, max(excess, 0)))
        second = self._t2.take(count - len(first))
        third = self._t1.take(count - len(first) - len(second))
        self._bury(self._b1, first)
        self._bury(self._b2, second)
        self._bury(self._b1, third)
        self._in_t2[second] = False
        self._trim_ghosts()
        return np.concatenate((first, second, third))

    def remove(self, rows: Rows) -> None:
        again = self._in_t2[rows]
        self._t1.remove(rows[~again])
        self._t2.remove(rows[again])
        self._in_t2[rows] = False

    def release(self, rows: Rows) -> None:
        self._t1.release(rows)
        self._t2.release(rows)

    def clear(self) -> None:
        DISPOSAL.add_array(self._in_t2)
        self._in_t2 = row_array(self.num_rows, np.bool_)
        self._t1.clear()
        self._t2.clear()
        DISPOSAL.add((self._b1, self._b2))
        self._b1, self._b2 = OrderedDict(), OrderedDict()
        self.target = 0.0

    @staticmethod
    def _add(log: RecencyLog, rows: Rows) -> None:
        log.append(rows)
        log.size += len(rows)

    def _learn(self, key: bytes) -> None:
        b1, b2 = len(self._b1), len(self._b2)
        if key in self._b1:
            self.target = min(float(self.num_rows), self.target + max(1.0, b2 / b1))
            del self._b1[key]
        else:
            self.target = max(0.0, self.target - max(1.0, b1 / b2))
            del self._b2[key]

    def _bury(self, ghosts: OrderedDict[bytes, None], rows: Rows) -> None:
        ghosts.update(dict.fromkeys(self.keys[rows].tolist()))

    def _trim_ghosts(self) -> None:
        """Keep |T1| + |B1| within the number of rows, and all four lists within twice that number."""
        while self._b1 and self._t1.size + len(self._b1) > self.num_rows:
            self._b1.popitem(last=False)
        while self._b2 and self._t1.size + self._t2.size + len(self._b1) + len(self._b2) > 2 * self.num_rows:
            self._b2.popitem(last=False)

"""The rows that are kept for a time: eviction passes over them as long as others suffice.

Two kinds of rows are kept, which differ in their bounds only. A *retained* row yields after a short search for another
one, a *pinned* row only if the table has no other one. Neither is pinned by a reader: a table always has the room that
it would have without them. A kept row that comes up as a victim becomes the policy's most recent one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tiering.table.policies.policy import EvictionPolicy, Rows
from tiering.table.row_array import row_array

RENEWAL = 8
"""A row that is kept already is kept anew if that adds one part in so many to its time."""

MOST_LISTED = 2
"""Quotient of the rows in a heap and all rows, beyond which the heap is made anew."""

LONGEST_LOOK = 4096
"""Number of rows that a search looks at before retained ones yield, unless more are needed."""

AHEAD = 256
"""Quotient of all rows and those that a search past kept rows evicts ahead of need at most."""


class KeptRows:
    """The rows of one kind.

    Args:
        num_rows: rows of the table.
        clock: monotonic clock, in seconds.
    """

    __slots__ = ("_clock", "_ends", "_listed", "_order", "_until", "rows")

    def __init__(self, num_rows: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: NDArray[np.float64] = row_array(num_rows, np.float64)
        """Time until which each row is kept; 0 for a row that is not."""
        self._ends: list[tuple[float, int, Rows]] = []
        """A heap of ends, with the rows that had this end then."""
        self._listed = 0
        """Number of rows in the heap."""
        self._order = count()
        self.rows = 0
        """Number of rows that are kept."""

    def keep(self, rows: Rows, seconds: float, most: int) -> int:
        """Keep the leading ``rows`` within the bound, and return the number of those with a new end.

        Args:
            rows: distinct rows, the most valuable one first.
            seconds: time from now on.
            most: largest number of rows that may be kept.
        """
        now = self._clock()
        self.expire(now)
        until = self._until[rows]
        chosen = until < now + seconds - seconds / RENEWAL
        new = (until == 0.0) & chosen
        chosen &= self.rows + np.cumsum(new) <= most
        rows = rows[chosen]
        if len(rows):
            self._listed += len(rows)
            self._until[rows] = now + seconds
            self.rows += int(np.count_nonzero(new & chosen))
            heapq.heappush(self._ends, (now + seconds, next(self._order), rows))
            if self._listed > MOST_LISTED * len(self._until):
                self._list_anew()
        return len(rows)

    def expire(self, now: float) -> None:
        """End the time of the rows whose end has come."""
        while self._ends and self._ends[0][0] <= now:
            rows = heapq.heappop(self._ends)[2]
            self._listed -= len(rows)
            self.discard(rows[self._until[rows] <= now])

    def _list_anew(self) -> None:
        """Make the heap anew: most of its rows are kept no longer, or have a later end."""
        kept = np.flatnonzero(self._until)
        kept = kept[np.argsort(self._until[kept])]
        ends = self._until[kept]
        parts = np.split(kept, np.flatnonzero(ends[1:] != ends[:-1]) + 1)
        self._ends = [(float(self._until[part[0]]), next(self._order), part) for part in parts]  # sorted: a heap
        self._listed = len(kept)

    def discard(self, rows: Rows) -> None:
        """Keep ``rows`` no longer; others are ignored."""
        marked = rows[self._until[rows] > 0.0]
        if len(marked):
            self._until[marked] = 0.0
            self.rows -= len(marked)

    def are_kept(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the ``rows`` that are kept now."""
        mask: NDArray[np.bool_] = self._until[rows] > self._clock()
        return mask


class Keeping:
    """The kept rows of one table, and the choice of victims that passes over them.

    Args:
        num_rows: rows of the table.
        clock: monotonic clock, in seconds.
    """

    __slots__ = ("_clock", "_num_rows", "pinned", "retained")

    def __init__(self, num_rows: int, clock: Callable[[], float]) -> None:
        self._num_rows = num_rows
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Keep no row."""
        self.retained = KeptRows(self._num_rows, self._clock)
        """Rows that are kept as long as a short search finds others."""
        self.pinned = KeptRows(self._num_rows, self._clock)
        """Rows that are kept as long as the table has others."""

    def keep(self, rows: Rows, seconds: float, share: float, *, is_pin: bool) -> int:
        """Keep ``rows`` for a time, and return how many are kept or kept for longer.

        Args:
            rows: distinct rows, the most valuable one first.
            seconds: time from now on.
            share: largest share of the table's rows that may be kept in this way.
            is_pin: True to pin the rows, False to retain them.
        """
        kind = self.pinned if is_pin else self.retained
        return kind.keep(rows, seconds, int(share * self._num_rows))

    def discard(self, rows: Rows) -> None:
        """Keep ``rows`` no longer; others are ignored."""
        self.retained.discard(rows)
        self.pinned.discard(rows)

    def release(self, rows: Rows) -> None:
        """Do nothing: rows that have no reader any more are kept as before."""

    def evict(self, policy: EvictionPolicy, count: int, evictable: int) -> Rows:
        """Return at least ``count`` rows that a policy evicts.

        Args:
            policy: the policy.
            count: number of rows that are needed.
            evictable: number of rows that the policy could evict.
        """
        rows = policy.evict(count)
        kept = self.are_kept(rows)
        if not kept.any():
            return rows
        chosen, spared = [rows[~kept]], [rows[kept]]
        missing = len(spared[0])
        retained = missing - int(np.count_nonzero(self.pinned.are_kept(spared[0])))
        looked, size = count, missing
        while missing > 0 and looked < evictable and (looked < LONGEST_LOOK + count or retained < missing):
            size = min(max(missing, min(2 * size, self._num_rows // AHEAD)), evictable - looked)
            rows = policy.evict(size)
            kept = self.are_kept(rows)
            chosen.append(rows[~kept])
            spared.append(rows[kept])
            looked += size
            missing -= len(chosen[-1])
            retained += len(spared[-1]) - int(np.count_nonzero(self.pinned.are_kept(spared[-1])))
        passed = np.concatenate(spared)
        if missing > 0:
            pinned = self.pinned.are_kept(passed)
            passed = np.concatenate((passed[~pinned], passed[pinned]))
            chosen.append(passed[:missing])
            passed = passed[missing:]
        policy.insert(passed[::-1])
        return np.concatenate(chosen)

    def are_kept(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the ``rows`` that are kept now, in either way."""
        return self.retained.are_kept(rows) | self.pinned.are_kept(rows)

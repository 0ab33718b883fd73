"""The free rows of a table: a list, and rows that are found by their counts when they are needed.

The number of a row says where it is kept. Rows from ``swept`` on are *ahead of the sweep*, and in no list: such a row
is free if its count is 0 or :data:`FREE`, unless a block was inserted there since. All others are free if their count
is :data:`FREE`. Those are in the list, beside rows that were withdrawn from it and not removed yet.

A table with millions of rows thus becomes empty at once, and is swept in pieces.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiering.table.disposal import DISPOSAL
from tiering.table.policies.policy import RefCounts, Rows, distinct
from tiering.table.row_array import row_array

WRITING = -1
"""Reference count of a row that is being written. Such a row is neither readable nor evictable."""

FREE = -2
"""Reference count of a free row."""

UNSEEN = -3
"""Reference count of a row in no list of the table."""

SWEEP_ROWS = 4096
"""Rows that are examined together for free ones."""

NO_ROWS: Rows = np.empty(0, np.int64)
"""An empty batch of rows."""


class FreeRows:
    """The free rows of one table, in the order in which they are reserved.

    Args:
        refs: the table's reference counts. This class sets them to :data:`FREE` and :data:`UNSEEN` only.
        rows_free: True: all rows are free. False: no row is free until :meth:`add`.
    """

    __slots__ = ("_inserted", "_listed", "_refs", "_rows", "_unswept", "_withdrawn", "swept")

    def __init__(self, refs: RefCounts, *, rows_free: bool) -> None:
        num_rows = len(refs)
        self._refs = refs
        self._rows: NDArray[np.int32] = row_array(num_rows, np.int32)
        """The list, in the first entries. The last of these is reserved first."""
        self._listed = 0
        """Number of entries in the list."""
        self._withdrawn: set[int] = set()
        """Rows in the list that are not free any more."""
        self.swept = 0 if rows_free else num_rows
        """First row ahead of the sweep."""
        self._unswept = num_rows if rows_free else 0
        """Number of free rows ahead of the sweep."""
        self._inserted: NDArray[np.bool_] = row_array(num_rows, np.bool_)
        """Mask of the rows ahead of the sweep in which a block was inserted."""

    @property
    def count(self) -> int:
        """Number of free rows."""
        return self._listed - len(self._withdrawn) + self._unswept

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return a mask of the rows [start, stop) that are free."""
        refs = self._refs[start:stop]
        free: NDArray[np.bool_] = refs == FREE
        if self.swept < stop:
            ahead = max(start, self.swept)
            free[ahead - start :] |= (refs[ahead - start :] == 0) & ~self._inserted[ahead:stop]
        return free

    def take(self, count: int) -> Rows:
        """Reserve ``count`` free rows; there are as many. The caller sets their reference counts."""
        if count > self._listed or self._withdrawn:
            self._list(count)
        self._listed -= count
        rows: Rows = self._rows[self._listed : self._listed + count][::-1].astype(np.int64)
        return rows

    def add(self, rows: Rows) -> None:
        """Free rows that are in no list of the table; the first is reserved first."""
        self._refs[rows] = FREE
        if self.swept < len(self._refs):
            ahead = rows >= self.swept
            self._inserted[rows[ahead]] = False
            self._unswept += int(np.count_nonzero(ahead))
            rows = rows[~ahead]
        if self._withdrawn:
            still_listed = self._withdrawn.intersection(rows.tolist())
            self._withdrawn -= still_listed
            rows = rows[np.fromiter((row not in still_listed for row in rows.tolist()), np.bool_, len(rows))]
        self._rows[self._listed : self._listed + len(rows)] = rows[::-1]
        self._listed += len(rows)

    def insert(self, rows: Rows) -> None:
        """Record that blocks are inserted in ``rows``, which are in no list of the table."""
        if self.swept < len(self._refs):
            self._inserted[rows] = True

    def withdraw(self, rows: Rows) -> Rows:
        """Remove the free ones among ``rows``, and return them, each once. The caller sets their counts."""
        rows = distinct(rows)
        refs, ahead = self._refs[rows], rows >= self.swept
        free = (refs == FREE) | (ahead & (refs == 0) & ~self._inserted[rows])
        self._unswept -= int(np.count_nonzero(free & ahead))
        self._withdrawn.update(rows[free & ~ahead].tolist())
        taken: Rows = rows[free]
        return taken

    def withdraw_last(self, count: int) -> Rows:
        """Remove up to ``count`` free rows of those that would be reserved last, and return them."""
        while self._listed - len(self._withdrawn) < count and self._unswept:
            self._sweep()
        chosen: list[int] = []
        for start in range(0, self._listed, SWEEP_ROWS):
            rows = self._rows[start : min(start + SWEEP_ROWS, self._listed)]
            chosen += rows[self._refs[rows] == FREE].tolist()
            if len(chosen) >= count:
                break
        taken = np.array(chosen[:count], np.int64)
        self.withdraw(taken)
        return taken

    def forget(self, start: int, stop: int) -> int:
        """Make the free rows in [start, stop) unseen, and return how many there were."""
        free = np.flatnonzero(self.mask(start, stop)) + start
        listed = free[free < self.swept]
        self._withdrawn.update(listed.tolist())
        self._unswept -= len(free) - len(listed)
        self._refs[free] = UNSEEN
        return len(free)

    def begin_sweep(self, free: int) -> None:
        """Empty the list, and put all rows ahead of the sweep.

        Args:
            free: number of rows whose reference count is 0 or :data:`FREE`; all are free from now on.
        """
        self.swept = self._listed = 0
        self._unswept = free
        self._withdrawn.clear()
        DISPOSAL.add_array(self._inserted)
        self._inserted = row_array(len(self._refs), np.bool_)

    def _sweep(self) -> None:
        """List the free rows among the next ones ahead. They are reserved after all that are listed."""
        start, stop = self.swept, min(self.swept + SWEEP_ROWS, len(self._refs))
        found = np.flatnonzero(self.mask(start, stop)) + start
        self._refs[found] = FREE
        self._inserted[start:stop] = False
        listed = np.concatenate((found[::-1].astype(np.int32), self._rows[: self._listed]))
        self._rows[: len(listed)] = listed
        self._listed = len(listed)
        self._unswept -= len(found)
        self.swept = stop

    def _list(self, count: int) -> None:
        """Make the last ``count`` entries of the list free rows, without withdrawn ones; there are as many."""
        while self._listed - len(self._withdrawn) < count:
            self._sweep()
        if not self._withdrawn:
            return
        parts: list[NDArray[np.int32]] = []
        missing, end = count, self._listed
        while missing:
            rows = self._rows[max(0, end - missing) : end]
            free = self._refs[rows] == FREE
            self._withdrawn.difference_update(rows[~free].tolist())
            parts.append(rows[free])
            end -= len(rows)
            missing -= len(parts[-1])
        for part in reversed(parts):
            self._rows[end : end + len(part)] = part
            end += len(part)
        self._listed = end

"""The contract of an eviction policy, which orders the rows of one table and picks victims.

A policy runs on the scheduler's thread, inside a :class:`tiering.table.block_table.BlockTable`. Its methods take
batches of row numbers (int64 arrays), because the scheduler cannot afford a Python call per block. The stack file
names a custom policy as ``module:Class``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from tiering.table.row_array import row_array

Rows = NDArray[np.int64]
"""Row numbers: a one-dimensional int64 array."""
RefCounts = NDArray[np.int32]
"""The reference count of each row."""
RowKeys = NDArray[np.object_]
"""The key of each row; meaningless where no block is."""
Stamps = NDArray[np.int64]
"""Stamps: a one-dimensional int64 array."""


def distinct(rows: Rows) -> Rows:
    """Return ``rows`` in ascending order, each once.

    The first call of numpy.unique in a process imports numpy.ma, which takes up to 18 ms.
    """
    rows = np.sort(rows)
    first: Rows = rows[np.concatenate((rows[:1] == rows[:1], rows[1:] != rows[:-1]))]
    return first


class StampClock:
    """The stamps of all rows of a table, and the clock that issues them."""

    __slots__ = ("now", "stamps")

    def __init__(self, num_rows: int) -> None:
        self.stamps: Stamps = row_array(num_rows, np.int64)
        """Stamp of each row's last use; 0 for a row that has left its list."""
        self.now = 1
        """Next stamp."""


class EvictionPolicy(ABC):
    """The order in which a table's rows are evicted.

    In every batch of rows, the FIRST row is the most valuable (the head of a prefix) and the last row the least.

    Args:
        num_rows: number of rows in the table.
        refs: the table's reference counts, read-only for the policy. A row may be evicted if its count is 0.
        keys: the table's keys, read-only for the policy. A policy with ghost lists reads the keys of victims here.
    """

    def __init__(self, num_rows: int, refs: RefCounts, keys: RowKeys) -> None:
        self.num_rows = num_rows
        self.refs = refs
        """Reference count of each row, owned by the table."""
        self.keys = keys
        """Key of each row, owned by the table."""
        self.clock = StampClock(num_rows)
        """The stamps of the rows' uses, whose order a local tier restores after a restart."""

    @abstractmethod
    def insert(self, rows: Rows) -> None:
        """Add rows that have become readable, as the most recent ones. The policy knows none of them."""

    @abstractmethod
    def touch(self, rows: Rows) -> None:
        """Record a use of known rows."""

    def refresh(self, rows: Rows) -> None:
        """Make known rows the most recent ones without counting a use.

        The default counts a use. Policies that count uses override this method.
        """
        self.touch(rows)

    @abstractmethod
    def evict(self, count: int) -> Rows:
        """Choose and forget ``count`` rows whose reference count is 0, least valuable first.

        The table ensures that as many such rows exist. The keys of the victims are still in ``keys``.
        """

    @abstractmethod
    def remove(self, rows: Rows) -> None:
        """Forget known rows that were invalidated, not evicted."""

    @abstractmethod
    def release(self, rows: Rows) -> None:
        """Make known rows evictable again: their reference counts have fallen to 0.

        The policy may have passed over these rows while they were pinned.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows and ghosts. The cost must not depend on their numbers."""

"""The contract of an eviction policy: it orders the rows of one table and picks victims.

A policy lives on the scheduler's thread, inside a :class:`tiering.table.block_table.BlockTable`.  It deals in batches
of row numbers (int64 arrays), because a Python call per block is what the scheduler cannot afford.  A policy of one's
own is named ``module:Class`` in the stack file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
RefCounts = NDArray[np.int32]
RowKeys = NDArray[np.object_]


class EvictionPolicy(ABC):
    """Orders rows by how much they are worth keeping.

    Constructed as ``cls(num_rows, refs, keys)``.  ``refs`` and ``keys`` are the table's reference count and key of each
    row, which the policy only reads: a row may be evicted when its count is 0; a policy that remembers the dead finds
    their keys there.  The table calls :meth:`insert` when a row becomes readable, :meth:`remove` when a row leaves for
    another reason than eviction, :meth:`release` when rows that the policy may have passed over as pinned are evictable
    again.  In every batch of rows the FIRST is the most valuable (the head of a prefix) and the last the least.
    """

    def __init__(self, num_rows: int, refs: RefCounts, keys: RowKeys) -> None:
        self.num_rows = num_rows
        self.refs = refs
        self.keys = keys

    @abstractmethod
    def insert(self, rows: Rows) -> None:
        """``rows`` became readable and are the most recent.  None of them is known to the policy."""

    @abstractmethod
    def touch(self, rows: Rows) -> None:
        """``rows``, known to the policy, were used."""

    @abstractmethod
    def evict(self, count: int) -> Rows:
        """Choose and forget ``count`` rows whose reference count is 0, least valuable first.

        The table has made sure that there are so many, and has not taken the victims' keys away yet.
        """

    @abstractmethod
    def remove(self, rows: Rows) -> None:
        """``rows``, known to the policy, are gone (invalidated, not evicted)."""

    @abstractmethod
    def release(self, rows: Rows) -> None:
        """The reference counts of ``rows``, known to the policy, have fallen to 0."""

    @abstractmethod
    def order(self) -> Rows:
        """All known rows, pinned ones included, most valuable first (for checkpoints and tests; may be slow)."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, ghosts included."""

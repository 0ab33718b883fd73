"""The marks on a table's rows that change which are evicted: released, first victims, or kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiering.api.hints import KeptBlocks
from tiering.table.first_victims import FirstVictims, Holds
from tiering.table.kept_rows import Keeping
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows


class RowMarks:
    """The marks of one table.

    Args:
        refs: the table's reference counts.
        keys: the table's keys.
        policy: the table's eviction policy.
    """

    __slots__ = ("_keys", "_policy", "_refs", "first_victims", "keeping", "kinds", "released")

    def __init__(self, refs: RefCounts, keys: RowKeys, policy: EvictionPolicy) -> None:
        self._refs = refs
        self._keys = keys
        self._policy = policy
        self.first_victims: FirstVictims | None = None
        """Rows whose blocks another cache holds; None before :meth:`begin_first_victims`."""
        self.released: FirstVictims | None = None
        """Rows of blocks that no session needs any more; None before the first one."""
        self.keeping: Keeping | None = None
        """Rows that are kept for a time; None before the first one."""
        self.kinds: list[FirstVictims | Keeping] = []
        """The kinds in use; without any, the table calls none of the methods for marks."""

    def begin_first_victims(self, holds: Holds) -> None:
        """Let rows be marked as first victims from now on.

        Args:
            holds: says for each key whether its block is held elsewhere, so that its row may be evicted first.
        """
        self.first_victims = FirstVictims(self._refs, self._keys, holds)
        self.kinds.append(self.first_victims)

    def hold(self, rows: Rows) -> None:
        """Mark rows whose blocks another cache holds as first victims; the last one is evicted first.

        Kept rows are left out.
        """
        if self.first_victims is not None:
            self.first_victims.add(rows if self.keeping is None else rows[~self.keeping.are_kept(rows)])

    def choose(self, count: int, evictable: int) -> Rows:
        """Return ``count`` rows or a few more to evict: first victims, then those that the policy chooses.

        Args:
            count: number of rows that are needed.
            evictable: number of rows that could be evicted.
        """
        if not self.kinds:
            return self._policy.evict(count)
        chosen: list[Rows] = []
        for marked in (self.released, self.first_victims):
            if marked is not None and count and len(first := marked.take(count)):
                if self.first_victims is not None:
                    self.first_victims.discard(first)  # a row may have both marks
                self._policy.remove(first)
                chosen.append(first)
                count -= len(first)
                evictable -= len(first)
        if count and self.keeping is not None:
            chosen.append(self.keeping.evict(self._policy, count, evictable))
        elif count:
            chosen.append(self._policy.evict(count))
        rows = chosen[0] if len(chosen) == 1 else np.concatenate(chosen)
        if self.keeping is not None:
            self.keeping.evictions.count(len(rows))
        return rows

    def release(self, rows: Rows) -> None:
        """Let ``rows`` be evicted first, the last one before all, until they are used again."""
        if self.released is None:
            self.released = FirstVictims(self._refs, self._keys)
            self.kinds.append(self.released)
        if self.keeping is not None:
            self.keeping.discard(rows)
        self.released.add(rows)

    def keep(self, rows: Rows, kept: KeptBlocks, clock: Callable[[], float]) -> int:
        """Keep the rows of blocks for a time, and return how many are kept or kept for longer.

        Args:
            rows: distinct rows, the most valuable one first.
            kept: the bounds.
            clock: monotonic clock in seconds, the same in all calls.
        """
        if self.keeping is None:
            self.keeping = Keeping(len(self._refs), clock)
            self.kinds.append(self.keeping)
        for marked in (self.released, self.first_victims):
            if marked is not None:
                marked.discard(rows)
        if self.keeping.is_late(kept):
            self.release(rows[~self.keeping.are_kept(rows)])
            return 0
        count = self.keeping.keep(rows, kept)
        if len(late := self.keeping.take_late()):
            self.release(late)
        return count

    def count_kept(self, rows: Rows) -> int:
        """Return how many of ``rows`` are kept now."""
        return 0 if self.keeping is None else int(np.count_nonzero(self.keeping.are_kept(rows)))

    def used(self, rows: Rows) -> None:
        """Let ``rows`` be evicted first no more, because a request uses them."""
        if self.released is not None:
            self.released.discard(rows)
        if self.keeping is not None:
            self.keeping.used(rows)

    def taken(self, rows: Rows) -> None:
        """Remove the marks of rows that other blocks get."""
        for kind in self.kinds:
            kind.discard(rows)

    def unread(self, rows: Rows) -> None:
        """Make rows candidates again that have no reader any more, or have just become readable."""
        for kind in self.kinds:
            kind.release(rows)

    def clear(self) -> None:
        """Remove all marks."""
        for kind in self.kinds:
            kind.clear()

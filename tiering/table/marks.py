"""The marks on a table's rows that change which are evicted: released, first victims, or kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.api.hints import KeptBlocks
from tiering.table.free_rows import NO_ROWS
from tiering.table.kept_rows import Keeping
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows
from tiering.table.row_array import row_array

_LOOK = 32

Holds = Callable[[Sequence[bytes]], Sequence[bool]]
"""Function that says for each key whether the other cache holds its block now."""


class FirstVictims:
    """The rows of one table that are evicted first: not needed any more, or held by another cache too.

    The CPU tier of an engine marks the rows whose blocks the engine's own cache holds, and every tier those whose
    session is over. The row that was marked last is taken first. A pinned row keeps its mark and is passed over; it
    becomes a candidate again when its last reader has ended.

    A row that is taken costs another copy when its block leaves the engine's cache. The engine thus grants credit for
    the copies, and no row is taken while it is overdrawn.

    Args:
        refs: the table's reference counts.
        keys: the table's keys.
        holds: the other cache's answer, asked again for each row that is about to be evicted. Default None: a mark
            alone suffices.
        most_credit: bound of the credit, so that it follows the workload; default 0.
    """

    __slots__ = ("_candidates", "_count", "_holds", "_is_listed", "_keys", "_marked", "_most_credit", "_refs", "credit")

    def __init__(self, refs: RefCounts, keys: RowKeys, holds: Holds | None = None, most_credit: float = 0.0) -> None:
        self._refs = refs
        self._keys = keys
        self._holds = holds
        self._marked: NDArray[np.bool_] = np.zeros(len(refs), np.bool_)
        self._candidates: NDArray[np.int32] = row_array(len(refs), np.int32)
        """Distinct rows to look at, the last one first; some may have lost their mark."""
        self._count = 0
        """Number of candidates."""
        self._is_listed: NDArray[np.bool_] = np.zeros(len(refs), np.bool_)
        """True for each candidate."""
        self.credit = 0.0
        """Copies out of the other cache that may still be made; no row is taken below 0."""
        self._most_credit = most_credit

    def add(self, rows: Rows) -> None:
        """Mark distinct ``rows``; the last one is evicted first."""
        self._marked[rows] = True
        self._list(rows)

    def _list(self, rows: Rows) -> None:
        """Make distinct ``rows`` candidates; those that are candidates keep their places."""
        rows = rows[~self._is_listed[rows]]
        self._is_listed[rows] = True
        self._candidates[self._count : self._count + len(rows)] = rows
        self._count += len(rows)

    def discard(self, rows: Rows) -> None:
        """Remove the marks of ``rows``; rows without a mark are ignored."""
        self._marked[rows] = False

    def are_marked(self, rows: Rows) -> NDArray[np.bool_]:
        """Return for each of ``rows`` whether it is marked."""
        return self._marked[rows]

    def release(self, rows: Rows) -> None:
        """Make those of ``rows`` candidates again that are marked, because they have no readers any more."""
        marked = rows[self._marked[rows]]
        if len(marked):
            self._list(marked)

    def grant(self, copies: float) -> None:
        """Add to the credit."""
        self.credit = min(self.credit + copies, self._most_credit)

    def take(self, count: int) -> Rows:
        """Return up to ``count`` rows to evict; rows whose block has left the other cache lose their mark."""
        if self.credit < 0.0:
            return NO_ROWS
        found, missing = [NO_ROWS], count
        while self._count and missing:
            rows = self._candidates[max(0, self._count - max(missing, _LOOK)) : self._count][::-1].astype(np.int64)
            free = (self._marked[rows] & (self._refs[rows] == 0)).nonzero()[0][:missing]
            looked = rows if len(free) < missing else rows[: int(free[-1]) + 1]
            self._count -= len(looked)
            self._is_listed[looked] = False
            rows = rows[free]
            if len(rows):
                self._marked[rows] = False
                if self._holds is not None:
                    rows = rows[np.fromiter(self._holds(self._keys[rows].tolist()), np.bool_, len(rows))]
                found.append(rows)
                missing -= len(rows)
        return np.concatenate(found) if len(found) > 2 else found[-1]

    def clear(self) -> None:
        """Remove all marks."""
        self._marked = np.zeros(len(self._refs), np.bool_)
        self._is_listed = np.zeros(len(self._refs), np.bool_)
        self._count = 0


class RowMarks:
    """The marks of one table.

    Args:
        refs: the table's reference counts.
        keys: the table's keys.
        policy: the table's eviction policy.
    """

    __slots__ = ("_keys", "_policy", "_refs", "first_victims", "keeping", "kinds", "released", "spare")

    def __init__(self, refs: RefCounts, keys: RowKeys, policy: EvictionPolicy) -> None:
        self._refs = refs
        self._keys = keys
        self._policy = policy
        self.first_victims: FirstVictims | None = None
        """Rows whose blocks another cache holds; None before :meth:`begin_first_victims`."""
        self.spare: FirstVictims | None = None
        """First victims whose blocks need no further copy; they go before the others."""
        self.released: FirstVictims | None = None
        """Rows of blocks that no session needs any more; None before the first one."""
        self.keeping: Keeping | None = None
        """Rows that are kept for a time; None before the first one."""
        self.kinds: list[FirstVictims | Keeping] = []
        """The kinds in use; without any, the table calls none of the methods for marks."""

    def begin_first_victims(self, holds: Holds, most_credit: float = 0.0) -> None:
        """Let rows be marked as first victims from now on.

        Args:
            holds: says for each key whether its block is held elsewhere, so that its row may be evicted first.
            most_credit: bound of the credit for copies; default 0.
        """
        self.first_victims = FirstVictims(self._refs, self._keys, holds, most_credit)
        self.spare = FirstVictims(self._refs, self._keys, holds)
        self.kinds += (self.first_victims, self.spare)

    def hold(self, rows: Rows) -> None:
        """Mark rows whose blocks another cache holds as first victims; the last one is evicted first.

        Kept rows are left out.
        """
        if self.first_victims is not None and self.spare is not None:
            self.spare.discard(rows)
            self.first_victims.add(rows if self.keeping is None else rows[~self.keeping.are_kept(rows)])

    def spare_held(self, rows: Rows) -> NDArray[np.bool_]:
        """Let those of ``rows`` that are first victims go before the others, and return a mask of them."""
        if self.first_victims is None or self.spare is None:
            return np.zeros(len(rows), np.bool_)
        marked = self.first_victims.are_marked(rows)
        spared = rows[marked]
        self.first_victims.discard(spared)
        self.spare.add(spared)
        return marked

    def unhold(self, rows: Rows) -> None:
        """Let ``rows`` be first victims no more, because the other cache does not hold their blocks."""
        if self.first_victims is not None and self.spare is not None:
            self.first_victims.discard(rows)
            self.spare.discard(rows)

    def choose(self, count: int, evictable: int) -> Rows:
        """Return ``count`` rows or a few more to evict: first victims, then those that the policy chooses.

        Args:
            count: number of rows that are needed.
            evictable: number of rows that could be evicted.
        """
        if not self.kinds:
            return self._policy.evict(count)
        chosen: list[Rows] = []
        for marked in (self.released, self.spare, self.first_victims):
            if marked is not None and count and len(first := marked.take(count)):
                for other in (self.first_victims, self.spare, self.keeping):  # a row may have several marks
                    if other is not None:
                        other.discard(first)
                self._policy.remove(first)
                chosen.append(first)
                count -= len(first)
                evictable -= len(first)
        if count and self.keeping is not None and len(late := self.keeping.take_late(count, self._refs)):
            self.unhold(late)
            self._policy.remove(late)
            chosen.append(late)
            count -= len(late)
            evictable -= len(late)
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
        self.unhold(rows)
        if self.released is not None:
            self.released.discard(rows)
        return self.keeping.keep(rows, kept)

    def unkept(self, rows: Rows) -> Rows:
        """Return those of ``rows`` that are not kept now."""
        return rows if self.keeping is None else rows[~self.keeping.are_kept(rows)]

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

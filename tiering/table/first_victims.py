"""The rows that are evicted first: no session needs their blocks, or another cache holds them too.

The CPU tier of an engine marks the rows whose blocks the engine's own cache holds, and every tier those whose session
is over. The row that was marked last is taken first. A pinned row keeps its mark and is passed over; it becomes a
candidate again when its last reader has ended.

A row that is taken costs another copy when its block leaves the engine's cache. The engine thus grants credit for the
copies, and no row is taken while it is overdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.table.policies.policy import RefCounts, RowKeys, Rows

_NO_ROWS: Rows = np.empty(0, np.int64)
_LOOK = 32

Holds = Callable[[Sequence[bytes]], Sequence[bool]]
"""Function that says for each key whether the other cache holds its block now."""


class FirstVictims:
    """The marked rows of one table.

    Args:
        refs: the table's reference counts.
        keys: the table's keys.
        holds: the other cache's answer, asked again for each row that is about to be evicted. Default None: a mark
            alone suffices.
    """

    __slots__ = ("_candidates", "_holds", "_keys", "_marked", "_refs", "credit")

    def __init__(self, refs: RefCounts, keys: RowKeys, holds: Holds | None = None) -> None:
        self._refs = refs
        self._keys = keys
        self._holds = holds
        self._marked: NDArray[np.bool_] = np.zeros(len(refs), np.bool_)
        self._candidates: dict[int, None] = {}
        """Rows to look at, the last one first; some may have lost their mark."""
        self.credit = 0.0
        """Copies out of the other cache that may still be made; no row is taken below 0."""

    def add(self, rows: Rows) -> None:
        """Mark ``rows``; the last one is evicted first."""
        self._marked[rows] = True
        self._candidates.update(dict.fromkeys(rows.tolist()))

    def discard(self, rows: Rows) -> None:
        """Remove the marks of ``rows``; rows without a mark are ignored."""
        self._marked[rows] = False

    def release(self, rows: Rows) -> None:
        """Make those of ``rows`` candidates again that are marked, because they have no readers any more."""
        marked = rows[self._marked[rows]]
        if len(marked):
            self._candidates.update(dict.fromkeys(marked.tolist()))

    def grant(self, copies: float) -> None:
        """Add to the credit; an eighth of the rows bounds it, so that it follows the workload."""
        self.credit = min(self.credit + copies, len(self._refs) / 8)

    def take(self, count: int) -> Rows:
        """Return up to ``count`` rows to evict; rows whose block has left the other cache lose their mark."""
        if self.credit < 0.0:
            return _NO_ROWS
        candidates, found, missing = self._candidates, [_NO_ROWS], count
        while candidates and missing:
            size = min(len(candidates), max(missing, _LOOK))
            rows = np.fromiter((candidates.popitem()[0] for _ in range(size)), np.int64, size)
            rows = rows[self._marked[rows] & (self._refs[rows] == 0)]
            candidates.update(dict.fromkeys(rows[missing:][::-1].tolist()))
            rows = rows[:missing]
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
        self._candidates = {}

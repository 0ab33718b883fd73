"""The rows that are kept for a time: eviction passes over them as long as others suffice.

Two kinds of rows are kept, which differ in their bounds only. A *retained* row yields after a short search for another
one, a *pinned* row only if the table has no other one. Neither is pinned by a reader: a table always has the room that
it would have without them. A kept row that comes up as a victim becomes the policy's most recent one.

A share bounds each kind. Beyond it, rows whose time ends soon stay: they take the room for the shortest time.

Rows that only one session uses, which returns at a known time, may also be evicted first. Each eviction compares: such
rows go before others, the farthest return first, if the session returns later than a row is used on average, twice
over, and later than evictions take to reach a recent row. Beyond the share, the latter suffices. The room thus goes to
the rows that are used soonest, by what is known of each.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tiering.api.hints import EXPECT_FACTOR, KeptBlocks
from tiering.table.free_rows import NO_ROWS
from tiering.table.policies.policy import EvictionPolicy, RefCounts, Rows
from tiering.table.row_array import row_array

RENEWAL = 8
"""A row that is kept already is kept anew if that adds one part in so many to its time."""

MOST_LISTED = 2
"""Quotient of the rows put into the heaps and all rows, beyond which the heaps are made anew."""

LONGEST_LOOK = 4096
"""Number of rows that a search looks at before retained ones yield, unless more are needed."""

AHEAD = 256
"""Quotient of all rows and those that a search past kept rows evicts ahead of need at most."""

MOST_IDLE = 2.0
"""Quotient of the longest time of own rows and of the mean time between two uses of a row.

An average row is used more often than those that would be evicted next, for which the kept ones take the room.
"""

MOST_ENDED = 512
"""Largest number of sessions whose rows one call no longer keeps: the scheduler's thread waits for it."""

_FEW = 64


@dataclass(slots=True)
class _Tenant:
    """The kept rows of one tenant."""

    name: bytes
    rows: int = 0
    """Number of rows."""
    farthest: list[tuple[float, int, Rows]] = field(default_factory=list)
    """A heap of negated ends, the farthest and latest first, with the rows that had this end then."""


class KeptRows:
    """The rows of one kind.

    Beyond the bound, the tenant with the most rows yields: of its rows those with the farthest end, tails first. No
    tenant yields below an equal share.

    Args:
        num_rows: rows of the table.
        clock: monotonic clock, in seconds.
    """

    __slots__ = (
        "_clock",
        "_ends",
        "_ids",
        "_listed",
        "_order",
        "_own",
        "_owner",
        "_sizes",
        "_tenants",
        "_until",
        "_yielded",
        "returns",
        "rows",
    )

    def __init__(self, num_rows: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: NDArray[np.float64] = row_array(num_rows, np.float64)
        """Time until which each row is kept; 0 for a row that is not."""
        self._owner: NDArray[np.int64] = row_array(num_rows, np.int64)
        """Number of the tenant of each kept row."""
        self.returns: NDArray[np.float64] = row_array(num_rows, np.float64)
        """Time at which the only session of each row is expected; 0: none.

        It is negative once a request has used the row.
        """
        self._ids: dict[bytes, int] = {}
        self._tenants: dict[int, _Tenant] = {}
        """The tenants that have rows, by their numbers."""
        self._sizes: list[tuple[int, int]] = []
        """A heap of negated numbers of rows and of tenants; some tenants have fewer rows by now."""
        self._ends: list[tuple[float, int, Rows]] = []
        """A heap of ends, with the rows that had this end then."""
        self._listed = 0
        """Number of rows that were put into the heaps since these were made."""
        self._order = count()
        self.rows = 0
        """Number of rows that are kept."""
        self._own: list[tuple[float, int, Rows]] = []
        """A heap of negated times of return, the farthest first, with the rows that had this time then."""
        self._yielded: list[Rows] = []
        """Own rows that found no room within the bound since the last :meth:`evict_yielded_first`."""

    def keep(self, rows: Rows, seconds: float, most: int, tenant: bytes = b"", *, is_own: bool = False) -> int:
        """Keep rows within the bound, and return the number of those that got a new end.

        Args:
            rows: distinct rows, the most valuable one first.
            seconds: time from now on.
            most: largest number of rows that may be kept.
            tenant: the tenant that keeps them; default: the one of requests without a cache salt.
            is_own: True if only the session that is expected uses them; default False.
        """
        now = self._clock()
        self.expire(now)
        is_anew = self._until[rows] < now + seconds - seconds / RENEWAL
        if is_own and most:
            # A new expectation replaces an old one of the session, but no action that keeps its blocks for longer.
            rows = rows[is_anew | (self.returns[rows] != 0.0)]
            self.returns[rows] = back = now + seconds / EXPECT_FACTOR
            if len(rows):
                heapq.heappush(self._own, (-back, -next(self._order), rows))
        else:
            rows = rows[is_anew]
            self.returns[rows] = 0.0
        beyond = rows[most:]
        self._note_yielded(beyond[self._until[beyond] == 0.0])  # those that are kept yield below, at most once
        rows = rows[:most]
        if not len(rows):
            return 0
        self.discard(rows)  # they get another end, and perhaps another tenant
        owner = self._ids.setdefault(tenant, next(self._order))
        kept = self._tenants.setdefault(owner, _Tenant(tenant))
        kept.rows += len(rows)
        self.rows += len(rows)
        self._until[rows] = end = now + seconds
        self._owner[rows] = owner
        self._list(kept, rows, end)
        heapq.heappush(self._sizes, (-kept.rows, owner))
        if self.rows > most:
            self._yield(most)
        self._listed += len(rows)
        if self._listed > MOST_LISTED * len(self._until):
            self._list_anew()
        if len(self._sizes) > _FEW + 2 * len(self._tenants):
            self._sizes = [(-tenant.rows, owner) for owner, tenant in self._tenants.items()]
            heapq.heapify(self._sizes)
        return int(np.count_nonzero(self._until[rows]))

    def _list(self, tenant: _Tenant, rows: Rows, end: float) -> None:
        number = next(self._order)
        heapq.heappush(self._ends, (end, number, rows))
        heapq.heappush(tenant.farthest, (-end, -number, rows))

    def _yield(self, most: int) -> None:
        """Keep rows no longer until at most ``most`` are kept."""
        while (excess := self.rows - most) > 0:
            listed, owner = heapq.heappop(self._sizes)
            tenant = self._tenants.get(owner)
            if tenant is None:
                continue
            if tenant.rows == -listed:
                end, number, rows = heapq.heappop(tenant.farthest)
                rows = rows[(self._until[rows] == -end) & (self._owner[rows] == owner)]
                left = max(0, len(rows) - min(excess, tenant.rows - most // len(self._tenants)))
                if left:
                    heapq.heappush(tenant.farthest, (end, number, rows[:left]))
                self.discard(rows[left:])
                self._note_yielded(rows[left:])
            if tenant.rows:
                heapq.heappush(self._sizes, (-tenant.rows, owner))

    def _note_yielded(self, rows: Rows) -> None:
        if len(own := rows[self.returns[rows] > 0.0]):
            self._yielded.append(own)

    def evict_yielded_first(self, limit: float) -> None:
        """Let own rows go before others that have yielded and whose session returns after ``limit``."""
        if not self._yielded:
            return
        rows, self._yielded = np.concatenate(self._yielded), []
        rows = rows[(self.returns[rows] > limit) & (self._until[rows] == 0.0)]
        self.returns[rows] = math.inf
        heapq.heappush(self._own, (-math.inf, -next(self._order), rows))

    def expire(self, now: float) -> None:
        """End the time of the rows whose end has come, of the sessions that ended first.

        Those of further sessions are not kept either (:meth:`are_kept`), and count until a later call.
        """
        ended: list[Rows] = []
        while self._ends and self._ends[0][0] <= now and len(ended) < MOST_ENDED:
            ended.append(heapq.heappop(self._ends)[2])
        if ended:
            rows = np.unique(np.concatenate(ended))  # a row is in one list for each of its ends
            self.discard(rows[self._until[rows] <= now])

    def _list_anew(self) -> None:
        """Make the heaps of rows anew: most of their rows are kept no longer, or have a later end."""
        kept = np.flatnonzero(self._until)
        kept = kept[np.lexsort((self._until[kept], self._owner[kept]))]
        ends, owners = self._until[kept], self._owner[kept]
        self._ends, self._listed = [], len(kept)
        for tenant in self._tenants.values():
            tenant.farthest = []
        for part in np.split(kept, np.flatnonzero((ends[1:] != ends[:-1]) | (owners[1:] != owners[:-1])) + 1):
            if len(part):
                self._list(self._tenants[int(self._owner[part[0]])], part, float(self._until[part[0]]))
        expected = np.flatnonzero(self.returns > self._clock())
        expected = expected[np.argsort(self.returns[expected], kind="stable")]
        backs = self.returns[expected]
        parts = np.split(expected, np.flatnonzero(backs[1:] != backs[:-1]) + 1)
        self._own = [(-float(self.returns[part[0]]), -next(self._order), part) for part in parts if len(part)]
        heapq.heapify(self._own)

    def take_late(self, limit: float, count: int) -> Rows:
        """Return up to ``count`` own rows, whose sessions return at ``limit`` or later.

        The farthest return comes first, and of each session the tail. They are own rows no more. The look ends after
        many expectations that were met or replaced, because the scheduler's thread waits; the next one goes on there.
        """
        found, missing, looks = [NO_ROWS], count, count + _FEW
        while missing > 0 and looks and self._own and -self._own[0][0] >= limit:
            looks -= 1
            back, number, rows = heapq.heappop(self._own)
            rows = rows[self.returns[rows] == -back]
            if left := max(0, len(rows) - missing):
                heapq.heappush(self._own, (back, number, rows[:left]))
                rows = rows[left:]
            self.returns[rows] = 0.0
            found.append(rows[::-1])
            missing -= len(rows)
        return np.concatenate(found)

    def discard(self, rows: Rows) -> None:
        """Keep ``rows`` no longer; others are ignored."""
        marked = rows[self._until[rows] > 0.0]
        if not len(marked):
            return
        self._until[marked] = 0.0
        self.rows -= len(marked)
        for owner, gone in Counter(self._owner[marked].tolist()).items():
            tenant = self._tenants[owner]
            tenant.rows -= gone
            if not tenant.rows:
                del self._tenants[owner], self._ids[tenant.name]

    def are_kept(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the ``rows`` that are kept now."""
        mask: NDArray[np.bool_] = self._until[rows] > self._clock()
        return mask


class Pace:
    """The time in which something happens to as many rows as a table has.

    Args:
        num_rows: rows of the table.
        clock: monotonic clock, in seconds.
    """

    __slots__ = ("_clock", "_last", "_left", "_num_rows", "_since")

    def __init__(self, num_rows: int, clock: Callable[[], float]) -> None:
        self._num_rows = self._left = num_rows
        self._clock = clock
        self._since = clock()
        self._last = math.inf

    def count(self, rows: int) -> None:
        """Count rows to which it has happened."""
        self._left -= rows
        if self._left <= 0:
            now = self._clock()
            self._last, self._since, self._left = now - self._since, now, self._num_rows

    @property
    def seconds(self) -> float:
        """The time that it took last, or takes already; infinity before the first time."""
        return max(self._last, self._clock() - self._since)


class Keeping:
    """The kept rows of one table, and the choice of victims that passes over them.

    Args:
        num_rows: rows of the table.
        clock: monotonic clock, in seconds.
    """

    __slots__ = ("_clock", "_num_rows", "evictions", "pinned", "retained", "uses")

    def __init__(self, num_rows: int, clock: Callable[[], float]) -> None:
        self._num_rows = num_rows
        self._clock = clock
        self.evictions = Pace(num_rows, clock)
        """Pace of the rows that are evicted, by whatever choice."""
        self.uses = Pace(num_rows, clock)
        """Pace of the rows that requests use."""
        self.clear()

    def clear(self) -> None:
        """Keep no row."""
        self.retained = KeptRows(self._num_rows, self._clock)
        """Rows that are kept as long as a short search finds others."""
        self.pinned = KeptRows(self._num_rows, self._clock)
        """Rows that are kept as long as the table has others."""

    def keep(self, rows: Rows, kept: KeptBlocks) -> int:
        """Keep the rows of blocks for a time, and return how many are kept or kept for longer.

        Args:
            rows: distinct rows, the most valuable one first.
            kept: the time and the bounds.
        """
        kind = self.pinned if kept.is_pin else self.retained
        most = int(kept.share * self._num_rows)
        count = kind.keep(rows, kept.seconds, most, kept.tenant, is_own=kept.is_own)
        self.retained.evict_yielded_first(self._clock() + self.evictions.seconds)
        return count

    def take_late(self, count: int, refs: RefCounts) -> Rows:
        """Return up to ``count`` rows to evict first, because their sessions return late.

        Args:
            count: number of rows that are needed.
            refs: the table's reference counts.
        """
        latest = max(self.evictions.seconds, MOST_IDLE * self.uses.seconds)
        rows = self.retained.take_late(self._clock() + latest, count)
        return rows[(refs[rows] == 0) & ~self.pinned.are_kept(rows)] if len(rows) else rows

    def used(self, rows: Rows) -> None:
        """Record that requests use ``rows``, which count as shared until the session expects itself anew."""
        self.uses.count(len(rows))
        self.retained.returns[rows] = -np.abs(self.retained.returns[rows])

    def discard(self, rows: Rows) -> None:
        """Keep ``rows`` no longer; others are ignored."""
        self.retained.discard(rows)
        self.retained.returns[rows] = 0.0
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

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

import math
from collections import Counter
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tiering.api.hints import EXPECT_FACTOR, KeptBlocks
from tiering.table.free_rows import NO_ROWS
from tiering.table.policies.policy import EvictionPolicy, RefCounts, Rows
from tiering.table.row_array import row_array
from tiering.table.swept_heap import MOST_LISTED, Members, SweptHeap

RENEWAL = 8
"""A row that is kept already is kept anew if that adds one part in so many to its time."""

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

MOST_ENDED_ROWS = 1 << 14
"""Number of rows that one call no longer keeps, beyond which it ends no further session."""

ROWS_PER_LOOK = 64
"""Number of rows that take as much time as one entry of a heap."""

MOST_PASSED = 64
"""Number of replaced expectations that one eviction passes over, beyond the rows that it needs."""


def _have(times: NDArray[np.float64], sign: float) -> Callable[[float, Rows], NDArray[np.bool_]]:
    """Return the function that masks the rows whose time, multiplied by ``sign``, is a heap's number."""

    def have(number: float, rows: Rows) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = times[rows] == sign * number
        return mask

    return have


class _Tenant:
    """The kept rows of one tenant.

    Args:
        name: name of the tenant.
        until: the time until which each row of the table is kept.
    """

    __slots__ = ("farthest", "listed", "name", "rows")

    def __init__(self, name: bytes, until: NDArray[np.float64]) -> None:
        self.name = name
        self.rows = 0
        """Number of rows."""
        self.listed = 0
        """Number of rows in the heap of tenants, at least as many as the tenant has."""
        self.farthest = SweptHeap(_have(until, -1.0))
        """A heap of negated ends, the farthest and latest first, with the rows that had this end then."""


class _Tenants(dict[int, _Tenant]):
    """The tenants that have rows, by their numbers."""

    def are_listed(self, size: float, owners: Members) -> NDArray[np.bool_]:
        """Return a mask of the tenants that a heap has at a negated number of rows."""
        tenants = map(self.get, owners.tolist())
        return np.array([tenant is not None and tenant.listed == -size for tenant in tenants], np.bool_)


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
        self._tenants = _Tenants()
        self._sizes = SweptHeap(self._tenants.are_listed)
        """A heap of negated numbers of rows and of tenants; some tenants have fewer rows by now."""
        self._ends = SweptHeap(_have(self._until, 1.0))
        """A heap of ends, with the rows that had this end then."""
        self._order = count()
        self.rows = 0
        """Number of rows that are kept."""
        self._own = SweptHeap(_have(self.returns, -1.0))
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
        self.expire(now, MOST_ENDED_ROWS + 2 * len(rows))
        is_anew = self._until[rows] < now + seconds - seconds / RENEWAL
        if is_own and most:
            # A new expectation replaces an old one of the session, but no action that keeps its blocks for longer.
            rows = rows[is_anew | (self.returns[rows] != 0.0)]
            self.returns[rows] = back = now + seconds / EXPECT_FACTOR
            self._own.push(-back, -next(self._order), rows, len(self.returns) // MOST_LISTED)
        else:
            rows = rows[is_anew]
            self.returns[rows] = 0.0
        if len(rows) > most:
            beyond, rows = rows[most:], rows[:most]
            self._note_yielded(beyond[self._until[beyond] == 0.0])  # those that are kept yield below, at most once
        if not len(rows):
            return 0
        self.discard(rows)  # they get another end, and perhaps another tenant
        owner = self._ids.setdefault(tenant, next(self._order))
        kept = self._tenants.get(owner)
        if kept is None:
            kept = self._tenants[owner] = _Tenant(tenant, self._until)
        kept.rows += len(rows)
        self.rows += len(rows)
        self._until[rows] = end = now + seconds
        self._owner[rows] = owner
        number = next(self._order)
        self._ends.push(end, number, rows, self.rows)
        kept.farthest.push(-end, -number, rows, kept.rows)
        if kept.rows > kept.listed:
            self._list_tenant(owner, kept)
        if self.rows <= most:
            return len(rows)
        self._yield(most, rows)
        return int(np.count_nonzero(self._until[rows]))

    def _list_tenant(self, owner: int, tenant: _Tenant) -> None:
        """Let a tenant be found by its present number of rows."""
        tenant.listed = tenant.rows
        self._sizes.push(-tenant.rows, next(self._order), np.array([owner], np.int64), len(self._tenants))

    def _yield(self, most: int, latest: Rows) -> None:
        """Keep rows no longer until at most ``most`` are kept.

        If many looks find rows that are not kept, those yield that were kept last: the scheduler's thread waits.

        Args:
            most: largest number of rows that may be kept.
            latest: the rows that were kept last; those beyond ``most`` are not more.
        """
        looks = MOST_ENDED + len(latest)
        while (excess := self.rows - most) > 0 and looks > 0:
            looks -= 1
            size, _, owners, _ = self._sizes.pop()
            if not len(owners):
                continue
            owner = int(owners[0])
            tenant = self._tenants[owner]
            if tenant.rows == -size:
                end, number, rows, listed = tenant.farthest.pop()
                looks -= listed // ROWS_PER_LOOK
                left = max(0, len(rows) - min(excess, tenant.rows - most // len(self._tenants)))
                tenant.farthest.push(end, number, rows[:left], tenant.rows)
                self.discard(rows[left:])
                self._note_yielded(rows[left:])
            if tenant.rows:
                self._list_tenant(owner, tenant)
        if excess > 0:
            rows = latest[self._until[latest] > 0.0][-excess:]
            self.discard(rows)
            self._note_yielded(rows)

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
        self._own.push(-math.inf, -next(self._order), rows, len(self.returns) // MOST_LISTED)

    def expire(self, now: float, most: int = MOST_ENDED_ROWS) -> None:
        """End the time of the rows whose end has come, of the sessions that ended first.

        Those of further sessions are not kept either (:meth:`are_kept`), and count until a later call.

        Args:
            now: the present time.
            most: number of rows beyond which no further session is ended; default :data:`MOST_ENDED_ROWS`.
        """
        ended: list[Rows] = []
        while len(ended) < MOST_ENDED and most > 0 and (end := self._ends.first) is not None and end <= now:
            *_, rows, listed = self._ends.pop()
            ended.append(rows)
            most -= listed
        if ended:
            self.discard(np.unique(np.concatenate(ended)))  # rows that were kept twice at one time are listed twice

    def take_late(self, limit: float, count: int) -> Rows:
        """Return up to ``count`` own rows, whose sessions return at ``limit`` or later.

        The farthest return comes first, and of each session the tail. They are own rows no more. The look ends after
        many expectations that were met or replaced, because the scheduler's thread waits; the next one goes on there.
        """
        found, missing, looks = [NO_ROWS], count, count + MOST_PASSED
        while missing > 0 and looks > 0 and (first := self._own.first) is not None and -first >= limit:
            back, number, rows, listed = self._own.pop()
            looks -= 1 + listed // ROWS_PER_LOOK
            if left := max(0, len(rows) - missing):
                self._own.push(back, number, rows[:left], len(self.returns) // MOST_LISTED)
                rows = rows[left:]
            self.returns[rows] = 0.0
            found.append(rows[::-1])
            missing -= len(rows)
        return np.concatenate(found)

    def discard(self, rows: Rows) -> None:
        """Keep ``rows`` no longer; others are ignored."""
        if not self.rows or not len(marked := rows[self._until[rows] > 0.0]):
            return
        self._until[marked] = 0.0
        self.rows -= len(marked)
        owners = {next(iter(self._tenants)): len(marked)}
        if len(self._tenants) > 1:
            owners = Counter(self._owner[marked].tolist())
        for owner, gone in owners.items():
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

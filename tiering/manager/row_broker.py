"""Decisions who may have a primary row now: a store, a promotion, or a block that waits for a tier.

A queued block (:mod:`tiering.manager.cascade_queue`) that no tier has holds its row, so that the eviction policy passes
over it. A store or a promotion gets rows in this order:

1. Free rows, and rows that no queue holds, by the eviction policy. A block that another tier has is among them.
2. Rows of queued blocks, the tails of their requests first: at once if queued blocks hold more than half of the rows,
   or if their tier has neither taken nor ended a store for a second; else when the store or the promotion has waited
   for 0.1 s. A tier that keeps up frees rows by itself within that time.

While more than half of the rows wait for the fastest tier of a request, its stores are refused for 0.1 s, so that a
burst leaves half of the rows to the blocks that were used last. A tier that ends no store delays no other store, and
the last offer of a block never waits.

A search looks at a bounded number of blocks, however many are queued. Blocks whose rows it cannot take, because they
are in use, come next in their queue, so that the next search looks at others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.transfer import Rows, as_rows
from tiering.manager.cascade_queue import tails_of
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.requests import Request
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.primary.manager import CPUPrimaryTierOffloadingManager

TAKE_AFTER = 0.1
"""Seconds for which a store or a promotion waits for a tier that makes progress.

A write takes about as long.
"""

STALLED_AFTER = 1.0
"""Seconds without an end of a store after which no other store waits for a tier.

A busy machine may pause for shorter.
"""

QUEUE_SHARE = 0.5
"""Share of the primary rows that may wait for a tier before new stores wait for that tier."""

LONGEST_STEP = 1.0
"""Seconds of a step beyond which its length is taken for a pause of the engine."""

FADING = 0.05
"""Share by which the longest recent step becomes shorter with each further step."""

ROWS_AT_ONCE = 32
"""Number of rows that a search takes at most, unless more are needed.

The next stores then need no search.
"""

PART_AT_ONCE = 16
"""Largest quotient of all rows that queued blocks hold and the rows taken at once, below that bound."""

LOOK_AT = 256
"""Number of blocks that a search looks at; four times the needed rows if these are more."""


class RowBroker:
    """Holds the rows of queued blocks, and gives them to stores and promotions.

    Args:
        primary: the primary tier.
        tiers: the secondary tiers, whose queues name the blocks.
        stats: the manager's counters.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: SecondaryTiers,
        stats: ManagerStats,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._readable = primary.readable
        self._tiers = tiers
        self._states = tiers.states
        self._stats = stats
        self._clock = clock
        self._held: NDArray[np.bool_] = np.zeros(primary.num_rows, np.bool_)
        """Per primary row, True if a queued block holds it: the row has one reader for this."""
        self.rows_held = 0
        """Number of rows that queued blocks hold."""
        self._most_rows = int(QUEUE_SHARE * primary.num_rows)
        self.longest_step = 0.0
        """Longest recent step with jobs in flight, in seconds."""
        self.stepped_at = math.inf
        """Time at which the present step began, if its length matters; else infinite."""

    def begin_step(self, now: float) -> None:
        """Note that a step begins with jobs in flight: its length matters."""
        self.stepped_at = now

    def end_step(self, now: float) -> None:
        """Measure the step that ends now, if its length matters."""
        seconds, self.stepped_at = now - self.stepped_at, math.inf
        if 0.0 <= seconds < LONGEST_STEP:
            self.longest_step = max(seconds, (1 - FADING) * self.longest_step)

    def hold(self, state: TierState, rows: Rows) -> None:
        """Hold ``rows`` of blocks that have just been queued for a tier, but for those that another tier has."""
        now = self._clock()
        free = ~self._held[rows]
        for other in self._states:
            if other is not state and other.in_service:
                free &= ~(other.has[rows] & (other.settled_until[rows] > now))
        chosen = rows[free]
        self._held[chosen] = True
        self.rows_held += len(chosen)
        self._primary.pin(chosen)

    def pass_on(self, state: TierState, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """Pin ``rows`` of blocks that have left the queue of a tier for a job, and hold them no longer.

        Args:
            state: the tier.
            keys: the blocks.
            rows: rows of the blocks, co-indexed with ``keys``.
        """
        leaving = self._held[rows] & ~self._named(keys, state)
        self._held[rows[leaving]] = False
        self.rows_held -= int(np.count_nonzero(leaving))
        self._primary.pin(rows[~leaving])

    def release(self, rows: Rows) -> None:
        """Hold ``rows`` no longer, because a tier has their blocks."""
        if self.rows_held:
            held = rows[self._held[rows]]
            if len(held):
                self._held[held] = False
                self.rows_held -= len(held)
                self._primary.unpin(held)

    def empty(self, state: TierState) -> int:
        """Empty the queue of a tier, and return the number of blocks that it had."""
        keys = state.queue.clear()
        if keys and self.rows_held:
            named = self._named(keys, state)
            rows = np.fromiter(self._readable.rows(keys), np.int64, len(keys))
            self.release(rows[~named])
        return len(keys)

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """Count blocks that were evicted from the primary tier, and take them off all queues."""
        if keys:
            self._stats.evicted_blocks += len(keys)
            for state in self._states:
                if state.queue:
                    self._count_evicted(state, state.queue.drop(keys))

    def _named(self, keys: Sequence[OffloadKey], but: TierState) -> NDArray[np.bool_]:
        """Return a mask of the ``keys`` that the queue of another tier than ``but`` has."""
        named = np.zeros(len(keys), np.bool_)
        for state in self._states:
            if state is not but and state.queue:
                named |= np.fromiter(map(state.queue.__contains__, keys), np.bool_, len(keys))
        return named

    def _count_evicted(self, state: TierState, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self._stats.queued_evicted += len(keys)
            self._tiers.report_unstored(state, keys)

    def refuses(self, request: Request, keys: Sequence[OffloadKey]) -> bool:
        """Return True if a store of ``keys`` is to wait, because too many rows wait for its fastest tier.

        Args:
            request: the request that stores the blocks.
            keys: the blocks.
        """
        for state in request.tiers:
            if state.in_service:
                break
        else:
            return False
        if state.cascading_rows + len(state.queue.lane_of) <= self._most_rows:
            return False
        now = self._clock()
        if self._stalls(state, now) or not _is_patient(request.refused_since, now):
            return False
        return bool(self._primary.unknown(keys))

    def take_rows(self, keys: Sequence[OffloadKey], request: Request, *, is_last: bool) -> bool:
        """Take rows of queued blocks for a store of ``keys``, and return True if some were taken.

        Args:
            keys: the blocks; none of their own rows is taken.
            request: the request that stores the blocks.
            is_last: True if the blocks are not offered again, so that the store must not wait.
        """
        new = len(self._primary.unknown(keys))
        missing = max(1, new - self._primary.room) + len(keys) - new
        since = -math.inf if is_last else request.refused_since
        return self.make_room(missing, since, least=missing, keep=frozenset(keys)) > 0

    def make_room(self, count: int, since: float | None, *, least: int = 1, keep: Collection[OffloadKey] = ()) -> int:
        """Evict queued blocks, and return the number of rows that are free for it.

        Args:
            count: number of rows that are needed.
            since: time since when the store or promotion waits for rows; None: it does not wait yet.
            least: smallest useful number of rows; if fewer can be taken, none is. Default 1.
            keep: blocks whose rows are not taken; default: none.
        """
        if not self.rows_held:
            return 0
        now = self._clock()
        queued = [state for state in self._states if state.queue]
        givers = queued
        if self.rows_held <= self._most_rows and _is_patient(since, now):
            givers = [state for state in queued if self._stalls(state, now)]
        keeping = [state for state in queued if state not in givers]
        chosen: dict[OffloadKey, int] = {}
        count = max(count, min(ROWS_AT_ONCE, self.rows_held // PART_AT_ONCE))
        # The last blocks of a queue nearly always suffice.
        for look in (2 * count, max(LOOK_AT, 4 * count)):
            for state in givers:
                if len(chosen) < count and look > 0:
                    look -= self._look(state, look, count, chosen, keep, keeping)
        if len(chosen) < least:
            return 0
        for state in queued:
            self._count_evicted(state, state.queue.drop(chosen))
        self.release(as_rows(list(chosen.values())))
        # The policy would pass over all held rows before it finds these.
        self._primary.drop(list(chosen))
        self._stats.evicted_blocks += len(chosen)
        return len(chosen)

    def _look(
        self,
        state: TierState,
        look: int,
        count: int,
        chosen: dict[OffloadKey, int],
        keep: Collection[OffloadKey],
        keeping: Sequence[TierState],
    ) -> int:
        """Add blocks of one queue to ``chosen``, and return how many it has looked at.

        Args:
            state: the tier.
            look: largest number of blocks to look at.
            count: number of blocks in ``chosen`` at which the look ends.
            chosen: blocks whose rows can be taken, with their rows.
            keep: blocks whose rows are not taken.
            keeping: tiers whose queued blocks keep their rows.
        """
        found = list(islice(tails_of(state.queue.lanes_from_last(look)), look))
        rows = np.fromiter([self._readable[key] for _, key in found], np.int64, len(found))
        free = self._held[rows] & (self._primary.readers(rows) == 1)
        busy = []
        for (lane, key), row, is_free in zip(found, rows.tolist(), free.tolist(), strict=True):
            if len(chosen) == count:
                break
            if is_free and key not in keep and not _is_queued(key, keeping):
                chosen[key] = row
            elif key not in chosen:
                busy.append((lane, key))
        state.queue.come_next(busy)
        return len(found)

    def _stalls(self, state: TierState, now: float) -> bool:
        """Return True if a tier has neither ended nor taken a store for a while, and for two steps at least."""
        return now - max(state.cascade_ended, state.queued_since) >= max(STALLED_AFTER, 2 * self.longest_step)


def _is_patient(since: float | None, now: float) -> bool:
    """Return True if a store or a promotion that waits since ``since`` waits on."""
    return since is None or now - since < TAKE_AFTER


def _is_queued(key: OffloadKey, states: Sequence[TierState]) -> bool:
    return any(key in state.queue for state in states)

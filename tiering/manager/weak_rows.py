"""Rows of waiting cascades, which stores and promotions may take.

A cascade that its tier has not begun holds its rows weakly. A row can be taken if nothing else uses it:

- at once, if another tier has the block, or if the tier has begun no store for a while: one tier in trouble costs the
  others nothing;
- otherwise when the store or the promotion has waited as long as a write takes. A tier that keeps up frees rows by
  itself within that time, and no cascade is lost.

The oldest cascades are given up first, each from the tail of its prefix. A block that loses its cascade is offered to
the tier again when the block is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.api.transfer import Rows
from tiering.manager.jobs import TierJobs
from tiering.manager.tiers import SecondaryTiers, TierState
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import WaitingStores

TAKE_AFTER = 0.1
"""Seconds after which a row is taken from a cascade of a tier that makes progress.

A write takes about as long.
"""

PART_AT_ONCE = 16
"""Largest quotient of the waiting rows and the rows that are taken at once.

A search looks at all waiting rows, so its cost per row is bounded.
"""


class WeakRows:
    """Takes rows from the waiting cascades of one manager.

    Args:
        primary: the primary tier.
        tiers: the secondary tiers.
        jobs: the jobs of the tiers.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: SecondaryTiers,
        jobs: TierJobs,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._states = tiers.states
        self._call = tiers.call
        self._jobs = jobs
        self._clock = clock

    def make_room(self, count: int, since: float | None, least: int = 1) -> int:
        """Make rows of waiting cascades evictable, and return their number.

        Args:
            count: number of rows that are needed.
            since: time since when the store or promotion waits for rows; None: it does not wait yet.
            least: smallest useful number of rows; if fewer can be taken, none is. Default 1.
        """
        now = self._clock()
        found: list[tuple[TierState, WaitingStores]] = []
        for state in reversed(self._states):
            waiting = self._call(state, state.tier.waiting_stores) if state.in_service else None
            if waiting is not None:
                found.append((state, waiting))
        if not found:
            return 0
        rows, first, cascades = np.unique(
            np.concatenate([waiting.rows for _, waiting in found]), return_index=True, return_counts=True
        )
        free = self._primary.readers(rows) == cascades
        if since is None or now - since < TAKE_AFTER:
            free &= self._expendable(rows, found, now)
        chosen = rows[free][np.argsort(first[free])][: max(count, len(rows) // PART_AT_ONCE)]
        if len(chosen) < least:
            return 0
        before, taken = self._primary.room, frozenset(chosen.tolist())
        for state, _ in found:
            for job_id, withdrawn in self._call(state, state.tier.withdraw_stores, taken) or ():
                self._jobs.give_up(state, job_id, withdrawn)
        return self._primary.room - before

    def _expendable(
        self, rows: Rows, found: Sequence[tuple[TierState, WaitingStores]], now: float
    ) -> NDArray[np.bool_]:
        """Return a mask of the ``rows`` whose blocks another tier has, or that wait for tiers in trouble only."""
        waits = {state.rank: np.isin(rows, waiting.rows) for state, waiting in found}
        expendable = np.ones(len(rows), np.bool_)
        for state, waiting in found:
            if now - waiting.since < TAKE_AFTER:
                expendable &= ~waits[state.rank]
        for state in self._states:
            if state.in_service:
                settled = state.settled_until[rows] > now
                expendable |= settled & ~waits[state.rank] if state.rank in waits else settled
        return expendable

"""A bound on the rows that the cascades to the fastest tier hold.

Stores may come faster than the fastest secondary tier writes. Each of them pins its rows until the cascade ends, so a
burst soon pins nearly all rows. The few that are left are evicted again and again: a block that requests share leaves
right after its promotion, and its repeated loads take the medium's time from the stores. While cascades to the fastest
tier hold more than a share of all rows, a store is therefore put off. The engine offers it again at a later step. The
other rows remain a cache of the blocks that were used last.

Where stores come faster than the tier writes for long, waiting does not help. A request therefore waits only once in a
busy period, however many stores it has. The period ends when an offer finds few rows held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.api.keys import OffloadKey
from tiering.manager.requests import Request
from tiering.manager.tiers import SecondaryTiers, TierState
from tiering.manager.weak_rows import TAKE_AFTER
from tiering.primary.manager import CPUPrimaryTierOffloadingManager

BACKLOG_SHARE = 0.5
"""Share of the primary rows that cascades to the fastest tier may hold before stores are put off."""

CALM_SHARE = 0.25
"""Share of the primary rows that these cascades hold at most when a busy period ends."""


class Backlog:
    """Decides which stores of one manager are put off.

    Args:
        primary: the primary tier.
        tiers: the secondary tiers.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, primary: CPUPrimaryTierOffloadingManager, tiers: SecondaryTiers, clock: Callable[[], float]
    ) -> None:
        self._primary = primary
        self._states = tiers.states
        self._clock = clock
        self._most = int(BACKLOG_SHARE * primary.num_rows)
        self._calm = int(CALM_SHARE * primary.num_rows)
        self._busy = False
        self._period = 0

    def puts_off(self, request: Request, keys: Sequence[OffloadKey]) -> bool:
        """Return True if a store of ``keys`` is to be offered again later.

        In a busy period, a request is put off for :data:`~tiering.manager.weak_rows.TAKE_AFTER` seconds at most. No
        store is put off if the tier has ended no cascade for so long: one tier in trouble costs the others nothing.

        Args:
            request: the request that stores the blocks.
            keys: the blocks.
        """
        state = self._fastest()
        if state is None or state.cascading_rows <= self._most:
            if self._busy and (state is None or state.cascading_rows <= self._calm):
                self._busy = False
            return False
        if not self._busy:
            self._busy = True
            self._period += 1
        now, waited = self._clock(), request.put_off_in == self._period
        if now - state.cascade_ended >= TAKE_AFTER or (waited and now - request.put_off_since >= TAKE_AFTER):
            return False
        if not self._primary.unknown(keys):
            return False
        if not waited:
            request.put_off_in, request.put_off_since = self._period, now
        return True

    def _fastest(self) -> TierState | None:
        for state in self._states:
            if state.in_service:
                return state
        return None

"""A bound on the rows that the cascades to the fastest tier hold.

Stores may come faster than the fastest secondary tier writes. Each of them pins its rows until the cascade ends, so a
burst soon pins nearly all rows. The few that are left are evicted again and again: a block that requests share leaves
right after its promotion, and its repeated loads take the medium's time from the stores. While cascades to the fastest
tier hold more than a share of all rows, a store is therefore put off, as if no row was free. The engine offers it again
at a later step. The other rows remain a cache of the blocks that were used last.
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

    def puts_off(self, request: Request, keys: Sequence[OffloadKey]) -> bool:
        """Return True if a store of ``keys`` is to be offered again later.

        A request is put off for :data:`~tiering.manager.weak_rows.TAKE_AFTER` seconds at most. No store is put off if
        the tier has ended no cascade for so long: one tier in trouble costs the others nothing.

        Args:
            request: the request that stores the blocks.
            keys: the blocks.
        """
        state = self._fastest()
        if state is None or state.cascading_rows <= self._most:
            return False
        now = self._clock()
        if now - state.cascade_ended >= TAKE_AFTER:
            return False
        if request.refused_since is not None and now - request.refused_since >= TAKE_AFTER:
            return False
        return bool(self._primary.unknown(keys))

    def _fastest(self) -> TierState | None:
        for state in self._states:
            if state.in_service:
                return state
        return None

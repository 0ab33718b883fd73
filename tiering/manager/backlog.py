"""A bound on the rows that the cascades to the fastest tier hold.

Stores may come faster than the fastest secondary tier writes. Each of them pins its rows until the cascade ends, so a
burst soon pins nearly all rows. The few that are left are evicted again and again: a block that requests share leaves
right after its promotion, and its repeated loads take the medium's time from the stores. While cascades to the fastest
tier hold more than a share of all rows, a store is therefore put off. The engine offers it again at a later step. The
other rows remain a cache of the blocks that were used last. The fastest tier is the fastest one in service that the
request of the store may use: the backlog of another one does not grow by this store.

Where stores come faster than the tier writes for long, waiting does not help. A request therefore waits only once in a
busy period, however many stores it has. A period ends when no store has found so many rows held for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tiering.api.keys import OffloadKey
from tiering.manager.requests import Request
from tiering.manager.weak_rows import TAKE_AFTER
from tiering.primary.manager import CPUPrimaryTierOffloadingManager

BACKLOG_SHARE = 0.5
"""Share of the primary rows that cascades to the fastest tier may hold before stores are put off."""

CALM_AFTER = 1.0
"""Seconds without a store that found so many rows held, after which a busy period has ended."""


class Backlog:
    """Decides which stores of one manager are put off.

    Args:
        primary: the primary tier.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager, clock: Callable[[], float]) -> None:
        self._primary = primary
        self._clock = clock
        self.most_rows = int(BACKLOG_SHARE * primary.num_rows)
        """Rows that cascades to the fastest tier may hold; only beyond them need :meth:`puts_off` be asked."""
        self._busy_at = -math.inf
        self._period = 0

    def puts_off(self, request: Request, keys: Sequence[OffloadKey]) -> bool:
        """Return True if a store of ``keys`` is to be offered again later.

        In a busy period, a request is put off for :data:`~tiering.manager.weak_rows.TAKE_AFTER` seconds at most. No
        store is put off if the tier has ended no cascade for so long: one tier in trouble costs the others nothing.

        Args:
            request: the request that stores the blocks.
            keys: the blocks.
        """
        state = next((state for state in request.tiers if state.in_service), None)
        if state is None or state.cascading_rows <= self.most_rows:
            return False
        now = self._clock()
        if now - self._busy_at > CALM_AFTER:
            self._period += 1
        self._busy_at = now
        waited = request.put_off_in == self._period
        if now - state.cascade_ended >= TAKE_AFTER or (waited and now - request.put_off_since >= TAKE_AFTER):
            return False
        if not self._primary.unknown(keys):
            return False
        if not waited:
            request.put_off_in, request.put_off_since = self._period, now
        return True

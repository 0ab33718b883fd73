"""Requests that wait for primary rows for their promotions.

A promotion for which no row is free at this moment is no miss: its request waits, in a bounded queue, until its tier's
deadline for a load. Only the first request of the queue takes rows that do not suffice for it. All others take rows
only if these suffice, so that the blocks of two waiting requests never keep out each other for longer than a step. A
request does not wait for rows that only requests in the queue hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.api.misses import Refusal
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.requests import Request
from tiering.manager.tier_state import TierState

MAX_WAITING = 64
"""Largest number of requests that wait for rows; promotions of further requests are misses."""

LONGEST_WAIT = 30.0
"""Longest wait for rows, in seconds, for promotions from a tier without a deadline."""


class Wait(NamedTuple):
    """Rows that one request lacks for a promotion, with the times of its wait in monotonic seconds."""

    began: float
    """Time at which the wait began."""
    until: float
    """Time at which the wait ends."""
    key: OffloadKey
    """The first key without a row, which becomes a miss when the wait ends in vain."""
    position: int
    """Position of that key in the prompt."""
    rows: int
    """Number of rows that suffice for the promotion."""
    state: TierState
    """The tier that holds the blocks."""


def held_by(request: Request) -> int:
    """Return the number of rows that are reserved for a request, or being promoted for it."""
    return len(request.reserved) + len(request.asked)


class RoomWaiters:
    """The queue of one manager.

    Args:
        stats: the manager's counters.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, stats: ManagerStats, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._clock = clock
        self.waits: dict[Request, Wait] = {}
        """The waits, the first of the queue first. Only the methods of this class change the dictionary."""
        self.first_end = math.inf
        """Time before which no wait ends."""

    def comes_first(self, request: Request) -> bool:
        """Return True if no other request waits longer."""
        return next(iter(self.waits), request) is request

    def since(self, request: Request) -> float | None:
        """Return the time since when a request waits; None if the request does not wait."""
        wait = self.waits.get(request)
        return None if wait is None else wait.began

    def wait(self, request: Request, key: OffloadKey, position: int, rows: int, state: TierState) -> bool:
        """Let a request wait for rows, and return False if there is no room in the queue.

        The request waits as long as the tier lets it wait for a load, else :data:`LONGEST_WAIT`.

        Args:
            request: the request; its deadline is the one of its first wait in a row.
            key: the first block without a row.
            position: position of that block in the prompt.
            rows: number of rows that suffice for the promotion.
            state: the tier that holds the blocks.
        """
        wait = self.waits.get(request)
        if wait is None:
            if len(self.waits) >= MAX_WAITING:
                return False
            now, limit = self._clock(), state.traits.load_deadline
            until = now + (LONGEST_WAIT if limit is None else limit)
            self.first_end = min(self.first_end, until)
            self._stats.promotions_waited += 1
        else:
            now, until = wait.began, wait.until
        self.waits[request] = Wait(now, until, key, position, rows, state)
        return True

    def may_get_rows(self, request: Request, rows: int) -> bool:
        """Return True if some of the ``rows`` of promotions may become free while a request waits.

        The first request of the queue waits for all other requests. The others do not wait for rows that only requests
        in the queue hold: they go on at once, and thus release their own rows.

        Args:
            request: the request.
            rows: number of rows of all promotions and reservations.
        """
        if self.comes_first(request):
            return rows > held_by(request)
        waiting = {request, *self.waits}
        if rows > sum(map(held_by, waiting)):
            return True
        # Requests may share rows, so the sum may be too large.
        return rows > len(set[OffloadKey]().union(*(keys for one in waiting for keys in (one.reserved, one.asked))))

    def settle(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        """End the wait of a request whose search over ``keys`` did not have to wait."""
        wait = self.waits.get(request)
        if wait is not None and wait.key in keys:
            del self.waits[request]

    def end(self, request: Request) -> None:
        """End the wait of a request, if it waits."""
        self.waits.pop(request, None)

    def expire(self, now: float) -> None:
        """End the waits that are over at ``now``; the blocks without rows are misses."""
        for request, wait in list(self.waits.items()):
            if wait.until <= now:
                self.refuse(request, wait.key, Refusal.ROOM)
        self.first_end = min((wait.until for wait in self.waits.values()), default=math.inf)

    def refuse(self, request: Request, key: OffloadKey, why: Refusal) -> None:
        """Make ``key`` a miss for a request that goes on without it."""
        self.end(request)
        request.refused[key] = why
        self._stats.promotions_without_room += 1

    def clear(self) -> None:
        """End all waits, for a reset."""
        self.waits.clear()

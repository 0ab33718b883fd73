"""Reservations: promoted blocks that are pinned for the requests that asked for them.

A reservation lasts until its request loads the block or finishes, or until it expires. Promotions therefore cannot
evict each other's blocks for ever. Several requests may reserve the same row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.transfer import Rows, as_rows
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.requests import Request
from tiering.primary.manager import CPUPrimaryTierOffloadingManager


class Reservations:
    """The reservations of one manager.

    Args:
        primary: the primary tier that holds the blocks.
        stats: the manager's counters.
        clock: monotonic clock, in seconds.
        lifetime: seconds after which a reservation expires.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        stats: ManagerStats,
        clock: Callable[[], float],
        lifetime: float,
    ) -> None:
        self._primary = primary
        self._stats = stats
        self._clock = clock
        self._lifetime = lifetime
        self._expiries: deque[tuple[float, Request, list[OffloadKey]]] = deque()
        self._counts: NDArray[np.int32] = np.zeros(primary.num_rows, np.int32)
        """Per primary row, the number of its reservations."""
        self.next_expiry = math.inf
        """Time before which no reservation expires."""
        self.rows = 0
        """Rows with at least one reservation."""

    def reserve(self, request: Request, keys: list[OffloadKey], rows: Rows) -> None:
        """Reserve blocks that have just become readable for a request, unless it has finished.

        Args:
            request: the request that asked for the blocks.
            keys: the blocks.
            rows: rows of the blocks, co-indexed with ``keys``.
        """
        if request.finished:
            return
        self._primary.pin(rows)
        counts = self._counts[rows]
        self.rows += len(rows) - int(np.count_nonzero(counts))
        self._counts[rows] = counts + 1
        request.reserved.update(zip(keys, rows.tolist(), strict=True))
        until = self._clock() + self._lifetime
        self._expiries.append((until, request, keys))
        self.next_expiry = min(self.next_expiry, until)

    def claim(self, request: Request, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """Protect the rows of a load that begins now.

        Args:
            request: the request that loads.
            keys: blocks to load. The pin of a reserved block passes to the load; all other blocks are pinned.
            rows: rows of the blocks, co-indexed with ``keys``.
        """
        pop = request.reserved.pop
        reserved = [pop(key, None) is not None for key in keys]
        if False not in reserved:
            self._uncount(rows)
        else:
            mask = np.array(reserved, np.bool_)
            self._uncount(rows[mask])
            self._primary.pin(rows[~mask])

    def release(self, request: Request) -> None:
        """End all reservations of ``request``."""
        if request.reserved:
            self._unreserve(request, list(request.reserved))

    def expire(self, now: float) -> None:
        """End the reservations that have expired at ``now``."""
        while self._expiries and self._expiries[0][0] <= now:
            _, request, keys = self._expiries.popleft()
            self._stats.reservations_expired += self._unreserve(request, keys)
        self.next_expiry = self._expiries[0][0] if self._expiries else math.inf

    def clear(self) -> None:
        """End all reservations, for a reset."""
        for _, request, keys in self._expiries:
            self._unreserve(request, keys)
        self._expiries.clear()
        self.next_expiry = math.inf

    def _unreserve(self, request: Request, keys: Sequence[OffloadKey]) -> int:
        """End the reservations of a request for some blocks, and return the number of those that it still had."""
        if not request.reserved:
            return 0
        rows = [row for key in keys if (row := request.reserved.pop(key, None)) is not None]
        if rows:
            self._uncount(as_rows(rows))
            self._primary.unpin(as_rows(rows))
        return len(rows)

    def _uncount(self, rows: Rows) -> None:
        counts = self._counts[rows] - 1
        self._counts[rows] = counts
        self.rows -= len(rows) - int(np.count_nonzero(counts))

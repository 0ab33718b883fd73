"""Promotions before any lookup: for requests that wait in the engine's queue, and for prefetches.

An engine looks a request up when it can run it. Until then, the blocks that only slower tiers hold may come into the
CPU tier. A *prefetch* does the same without a request of the engine: it is a request of its own, which ends when
nothing is left to bring. In both cases, promotions and reservations together take at most half of their rows. Nothing
waits for rows, no block becomes a miss, and nothing begins while a request that was looked up waits for rows.

A prefetch belongs to a tenant, whose blocks per second are bounded. No answer depends on what it finds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from secrets import token_hex
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.prefix_search import PrefixSearch
from tiering.manager.promotions import Promotions
from tiering.manager.requests import Request, Requests

MOST_WAITING = 1024
"""Largest number of requests and prefetches that wait for promotions; further ones begin none.

As many prefetches at most wait for their time. Beyond that, the tenant with the most of them loses its latest one.
"""

MOST_PREFETCHES = 16
"""Largest number of prefetches of one tenant at a time; further ones are dropped."""

MOST_TENANTS = 1024
"""Largest number of tenants whose credit is kept; the least recent one is dropped beyond it."""

PATIENCE = 30.0
"""Seconds after which a prefetch begins nothing more."""

LOOKS_PER_STEP = 8
"""Largest number of waiting requests and prefetches that the end of a step looks at."""

HOLES_PER_LOOK = 16
"""Largest number of missing blocks that one look at the blocks of a session passes over."""

BLOCKS_PER_LOOK = 256
"""Largest number of blocks that one search of a prefetch looks at; a session may have more."""

AWAKE_SECONDS = 1.0
"""Time for which an engine without requests steps on after a prefetch has begun something."""

UNDECIDED_PAUSE = 0.05
"""Shortest pause before an undecided tier is asked again, in seconds; doubled up to a second."""


@dataclass(slots=True, eq=False)
class _Early:
    """A request or a prefetch whose promotions have not all begun."""

    request: Request
    keys: Sequence[OffloadKey]
    """The prefix, or the blocks of a session."""
    tenant: bytes | None = None
    """The tenant of a prefetch; None for a request of the engine."""
    per_second: float = 0.0
    """Blocks per second that the tenant may prefetch."""
    until: float = 0.0
    """Time after which a prefetch begins nothing more."""
    has_holes: bool = False
    """True if blocks behind a missing one are of use, as those of a session; False for a prompt."""
    complete: bool = False
    """True once nothing is left to begin."""
    look_at: float = 0.0
    """Time before which nothing is begun, because a tier was undecided."""
    pause: float = UNDECIDED_PAUSE
    """Seconds until an undecided tier is asked again."""
    start: int = 0
    """Blocks that a prefetch is done with: nothing is brought twice, however soon it is evicted."""


class _Later(NamedTuple):
    """A prefetch that begins later."""

    keys: Sequence[OffloadKey]
    tenant: bytes
    per_second: float
    has_holes: bool


class LaterPrefetches:
    """The prefetches that wait for their time."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._heap: list[tuple[float, int]] = []
        """Times and numbers; some prefetches are dropped by now."""
        self._waiting: dict[int, _Later] = {}
        self._of: dict[bytes, dict[int, None]] = {}
        """Numbers of each tenant's prefetches, the latest last."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_due(self) -> float:
        """Time before which none begins."""
        return self._heap[0][0] if self._waiting else math.inf

    def add(self, when: float, prefetch: _Later) -> None:
        """Add a prefetch for a time; without room, the tenant with the most loses its latest one."""
        own = self._of.setdefault(prefetch.tenant, {})
        if len(self._waiting) >= MOST_WAITING:
            most = max(self._of.values(), key=len)
            if len(most) <= len(own) + 1:
                if not own:
                    del self._of[prefetch.tenant]
                return
            self._take(next(reversed(most)))
        number = next(self._numbers)
        self._waiting[number] = prefetch
        own[number] = None
        if len(self._heap) > 2 * MOST_WAITING:
            self._heap = [listed for listed in self._heap if listed[1] in self._waiting]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (when, number))

    def due(self, now: float) -> Iterator[_Later]:
        """Yield and remove the prefetches whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            number = heapq.heappop(self._heap)[1]
            if number in self._waiting:
                yield self._take(number)

    def _take(self, number: int) -> _Later:
        later = self._waiting.pop(number)
        own = self._of[later.tenant]
        del own[number]
        if not own:
            del self._of[later.tenant]
        return later

    def clear(self) -> None:
        """Drop all."""
        for listed in (self._heap, self._waiting, self._of):
            listed.clear()


class EarlyPromotions:
    """The early promotions of one manager.

    Args:
        search: the search that promotes.
        promotions: the promotions of the manager.
        requests: the requests of the manager.
        finish: function that ends a request in the manager.
        stats: the manager's counters.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        search: PrefixSearch,
        promotions: Promotions,
        requests: Requests,
        finish: Callable[[ReqContext], object],
        stats: ManagerStats,
        clock: Callable[[], float],
    ) -> None:
        self._search = search
        self._promotions = promotions
        self._requests = requests
        self._finish = finish
        self._stats = stats
        self._clock = clock
        self.waiting: deque[_Early] = deque()
        """Requests and prefetches that are looked at again; in turns."""
        self._credit: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """Blocks that each tenant may prefetch, and the time at which they were counted."""
        self._prefetches: Counter[bytes] = Counter()
        """Number of prefetches of each tenant."""
        self._number = count(1)
        self._prefix = f"kv_tiering prefetch {token_hex(8)}"
        """First part of the ids of prefetches, random: each id is that of no other request."""
        self._awake_until = -math.inf
        self.later = LaterPrefetches()
        """The prefetches that begin later; :meth:`prefetch` and :meth:`step` change them."""

    @property
    def steps_idle(self) -> bool:
        """True if an engine without requests should step for prefetches that go on."""
        return bool(self._prefetches) and self._clock() < self._awake_until

    @property
    def next_due(self) -> float:
        """Time before which no prefetch begins."""
        return self.later.next_due

    def add(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        """Promote what the tiers hold of the prefix of a request that waits in the engine's queue."""
        if len(self.waiting) < MOST_WAITING:
            request.is_early = True
            early = _Early(request, keys)
            if not self._begin(early, len(keys), self._clock())[1]:
                self.waiting.append(early)

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        tenant: bytes,
        per_second: float,
        after: float = 0.0,
        *,
        has_holes: bool = False,
    ) -> None:
        """Promote what the tiers hold of a prefix, or of the blocks of a session, for no request.

        Args:
            keys: the blocks.
            tenant: whose bound it counts against.
            per_second: blocks per second that a tenant may prefetch.
            after: seconds until it begins, at the end of a step; default 0.
            has_holes: True to go on behind a block that no tier holds; default False.
        """
        if after:
            self.later.add(self._clock() + after, _Later(keys, tenant, per_second, has_holes))
            return
        if len(self.waiting) >= MOST_WAITING or self._prefetches[tenant] >= MOST_PREFETCHES:
            return
        request = self._requests.begin(ReqContext(f"{self._prefix} {next(self._number)}"))
        self._prefetches[tenant] += 1
        now = self._clock()
        self._awake_until = now + AWAKE_SECONDS
        self.waiting.append(_Early(request, keys, tenant, per_second, now + PATIENCE, has_holes))

    def step(self) -> None:
        """Begin the prefetches that are due, and look at the next requests and prefetches in turn."""
        now = self._clock()
        if now >= self.later.next_due:
            for later in self.later.due(now):
                self.prefetch(later.keys, later.tenant, later.per_second, has_holes=later.has_holes)
        for _ in range(min(LOOKS_PER_STEP, len(self.waiting))):
            early = self.waiting.popleft()
            tenant, request = early.tenant, early.request
            if tenant is None:
                if request.is_early and not request.finished and not self._begin(early, len(early.keys), now)[1]:
                    self.waiting.append(early)
                continue
            self._promotions.reservations.release(request)  # a prefetch loads nothing
            if not early.complete and not request.finished:
                early.complete = now >= early.until or self._prefetch(early, tenant, now)
            if request.finished or (early.complete and not request.asked):
                self._prefetches[tenant] -= 1
                self._prefetches += Counter()  # drop tenants without prefetches
                self._finish(request.ctx)
            else:
                self.waiting.append(early)

    def clear(self) -> None:
        """End all prefetches, and let no request wait, for a reset."""
        waiting, self.waiting = self.waiting, deque()
        self._prefetches.clear()
        self.later.clear()
        for early in waiting:
            if early.tenant is not None:
                self._finish(early.request.ctx)

    def _prefetch(self, early: _Early, tenant: bytes, now: float) -> bool:
        """Begin what the tenant's credit allows; return True if nothing is left."""
        rate = early.per_second
        credit, since = self._credit.pop(tenant, (max(1.0, rate), now))
        credit = min(max(1.0, rate), credit + (now - since) * rate)
        complete = False
        for _ in range(HOLES_PER_LOOK):
            if credit < 1.0:
                break
            begun, complete = self._begin(early, int(min(credit, len(early.keys))), now)
            if begun:
                credit -= begun
                self._stats.blocks_prefetched += begun
                self._awake_until = now + AWAKE_SECONDS
            if not complete or not early.has_holes or early.start + 1 >= len(early.keys):
                break
            early.start, complete = early.start + 1, False
        self._credit[tenant] = credit, now
        if len(self._credit) > MOST_TENANTS:
            self._credit.popitem(last=False)
        return complete

    def _begin(self, early: _Early, most: int, now: float) -> tuple[int, bool]:
        """Promote up to ``most`` blocks; return their number, and True if nothing is left for the next steps."""
        if self._promotions.waiters.waits or now < early.look_at:
            return 0, False
        keys, is_prefetch = early.keys, early.tenant is not None
        if is_prefetch:
            keys = keys[early.start : early.start + BLOCKS_PER_LOOK]
        match = self._search.begin(early.request, keys, most)
        if match.is_undecided:
            early.look_at, early.pause = now + early.pause, min(1.0, 2.0 * early.pause)
        if not is_prefetch:
            return match.begun, match.is_complete
        early.start += match.hits
        goes_on = match.hits > 0 and len(keys) == BLOCKS_PER_LOOK  # behind the blocks of this look
        return match.begun, match.is_complete and not goes_on

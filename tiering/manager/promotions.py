"""Promotions: loads of blocks from secondary tiers into primary rows, on behalf of requests.

A promotion takes its rows at once, so that a second request finds the block in flight. It is submitted at the end of
the step, as one job per tier and request. The first request that asks owns the promotion; if that request finishes,
another one inherits it.

Promoted blocks are reserved for the requests that asked (:mod:`tiering.manager.reservations`). The number of rows that
promotions and reservations hold together is bounded. A request whose promotion finds no row waits for one
(:mod:`tiering.manager.room`). An overdue promotion is a miss for its requests at once; its rows become free when the
tier reports the job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import not_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.misses import Refusal
from tiering.api.request_policy import DEFAULT_REQUEST_POLICY
from tiering.api.transfer import Rows, as_rows
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.requests import Request
from tiering.manager.reservations import Reservations
from tiering.manager.room import RoomWaiters
from tiering.manager.row_broker import RowBroker
from tiering.manager.tier_state import TierState
from tiering.primary.manager import CPUPrimaryTierOffloadingManager


@dataclass(slots=True, eq=False)
class Promotion:
    """Blocks that are being loaded from one tier into primary rows."""

    state: TierState
    """The tier that holds the blocks."""
    owner: Request
    """The request that the load job is submitted for."""
    keys: list[OffloadKey]
    rows: list[int]
    """Primary rows, co-indexed with ``keys``."""
    deadline: float
    """Time after which the promotion is overdue."""
    others: dict[OffloadKey, list[Request]] = field(default_factory=dict)
    """Per key, further requests that asked for it, the first one first."""
    awaited: bool = True
    """True while the keys are pending in the primary table; afterwards the rows are quarantined."""
    worthless: bool = False
    """True if a reset came after the promotion began: blocks that arrive are dropped."""
    ended: bool = False
    """True if the tier has reported the job."""


class Started(NamedTuple):
    """Result of the start of a promotion."""

    blocks: int
    """Number of blocks that are being promoted."""
    waits: bool
    """True if the request waits for rows for the other blocks; they may be promoted later."""


class Promotions:
    """All promotions of a manager, queued and running."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        reservations: Reservations,
        broker: RowBroker,
        stats: ManagerStats,
        clock: Callable[[], float],
        max_rows: int,
    ) -> None:
        """Create the promotions of one manager.

        Args:
            primary: the primary tier that the blocks are promoted into.
            reservations: the reservations of promoted blocks.
            broker: gives rows of queued blocks to promotions.
            stats: the manager's counters.
            clock: monotonic clock, in seconds.
            max_rows: largest number of rows that promotions and reservations may hold together.
        """
        self._primary = primary
        self._readable = primary.readable
        self._pending = primary.pending
        self.reservations = reservations
        """Promoted blocks that are pinned for the requests that asked."""
        self._broker = broker
        self._stats = stats
        self._clock = clock
        self._max_rows = max_rows
        self.waiters = RoomWaiters(stats, clock)
        """Requests that wait for rows."""
        self._in_flight: dict[OffloadKey, Promotion] = {}
        self._queued: dict[tuple[int, str], Promotion] = {}
        self._running: dict[int, deque[Promotion]] = {}
        self.next_deadline = math.inf
        """Time before which no running promotion is overdue."""
        self._probing = Request(NOBODY, DEFAULT_REQUEST_POLICY, [], [], finished=True)
        """Stands for a request in the promotions that only measure; nothing is reserved for it."""
        self.rows_promoting = 0
        """Rows of queued and running promotions, failed ones left out."""

    def join(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        """Add ``request`` to the promotions of ``keys``, which are pending in the primary table.

        Keys that are pending because they are being stored belong to no promotion and are left out.
        """
        if request.asked.issuperset(keys):
            return
        for key in keys:
            promotion = self._in_flight.get(key)
            if promotion is not None and key not in request.asked:
                request.asked.add(key)
                promotion.others.setdefault(key, []).append(request)

    def start(self, state: TierState, request: Request, keys: Sequence[OffloadKey], position: int = 0) -> Started:
        """Promote the leading ``keys`` as far as there is room.

        If there is no room for all of them, the request waits for rows, or the first key without room stays a miss for
        this request and is counted.

        Args:
            state: the tier that holds the blocks.
            request: the request that asks.
            keys: blocks that the primary table neither holds nor expects.
            position: number of blocks in front of ``keys`` that the request needs at the same time; default 0.
        """
        share, tier_share = self._shares(state)
        count = max(0, min(len(keys), share, tier_share))
        if count > self._primary.room:
            self._broker.make_room(count - self._primary.room, self.waiters.since(request))
            count = min(count, self._primary.room)
        waits = False
        if count < len(keys):
            waits = (
                position + count < self._primary.num_rows
                and (tier_share > count or count > 0 or self._loads_from(state))
                and (share > count or self.waiters.may_get_rows(request, self.rows_promoting + self.reservations.rows))
                and self.waiters.wait(request, keys[count], position + count, len(keys), state)
            )
            if not waits:
                self.waiters.refuse(request, keys[count], Refusal.ROOM)
            elif not self.waiters.comes_first(request):
                count = 0
        return Started(self._start(state, request, keys[:count]) if count else 0, waits)

    def start_unasked(self, state: TierState, owner: Request, keys: Sequence[OffloadKey]) -> int:
        """Promote the leading ``keys`` for no request, as far as there are free rows, and return their number.

        No block is evicted for them, and none is reserved.

        Args:
            state: the tier that holds the blocks.
            owner: stands for the request of the promotion, and is finished.
            keys: blocks that the primary table neither holds nor expects.
        """
        count = min(len(keys), *self._shares(state), self._primary.free)
        return self._start(state, owner, keys[:count]) if count > 0 else 0

    def start_probe(self, state: TierState, keys: Sequence[OffloadKey]) -> None:
        """Promote ``keys`` for no request, to measure the tier's loads.

        Without room for all, the last ones are: requests compute the head meanwhile, which others need more often.
        """
        count = min(len(keys), *self._shares(state), self._primary.room)
        if count > 0:
            for kept in (self._probing.brought, self._probing.failed, self._probing.refused):
                kept.clear()
            self._start(state, self._probing, keys[-count:])

    def source(self, key: OffloadKey) -> TierState | None:
        """Return the tier that a pending block comes from; None if it is being stored."""
        promotion = self._in_flight.get(key)
        return None if promotion is None else promotion.state

    def cut(self, request: Request) -> None:
        """End the wait of a request for loads of gated tiers, because computing would have taken as long.

        What has arrived counts. The I/O goes on; unless other requests wait for it, in rows that stay quarantined until
        it has ended.
        """
        request.load_by = math.inf
        wait = self.waiters.waits.get(request)
        if wait is not None and wait.state.gate is not None:
            request.is_cut = True
            self.waiters.refuse(request, wait.key, Refusal.CUT)
        for key in list(request.asked):
            promotion = self._in_flight.get(key)
            if promotion is None or (gate := promotion.state.gate) is None:
                continue
            request.is_cut = True
            if promotion.owner is request and not promotion.others and promotion not in self._queued.values():
                gate.cut += len(promotion.keys)
                self.fail(promotion, Refusal.CUT)
            else:
                gate.cut += 1
                request.refused[key] = Refusal.CUT
                request.asked.discard(key)
        request.awaited = None

    def start_early(self, state: TierState, request: Request, keys: Sequence[OffloadKey]) -> Started:
        """Promote the leading ``keys`` for a request before its lookup, in half of the promotions' rows.

        The request does not wait for rows in the queue, and no key becomes a miss for it.

        Args:
            state: the tier that holds the blocks.
            request: the request.
            keys: blocks that the primary table neither holds nor expects.
        """
        count = min(len(keys), *self._shares(state, part=2), self._primary.room)
        return Started(self._start(state, request, keys[:count]) if count > 0 else 0, count < len(keys))

    def awaited_rows(self, request: Request, keys: Sequence[OffloadKey]) -> int | None:
        """Return the position in ``keys`` up to which a request has blocks, if it must go on waiting for rows.

        The answer is known without a search for a request that is not the first of the queue and holds no rows, while
        the limits leave fewer rows than suffice for its promotion. Many requests may wait, and each asks at every step.

        Returns:
            The position; None if a search is needed.
        """
        wait = self.waiters.waits.get(request)
        if wait is None or request.asked or request.reserved:
            return None
        _, _, key, position, rows, state = wait
        if not state.in_service or self.waiters.comes_first(request):
            return None
        share, tier_share = self._shares(state)
        if min(share, tier_share) >= rows or (tier_share <= 0 and not self._loads_from(state)):
            return None
        if position >= len(keys) or keys[position] != key:
            return None
        return None if key in self._readable or key in self._pending else position

    def _shares(self, state: TierState, part: int = 1) -> tuple[int, int]:
        """Return how many more rows all promotions, and those from a tier, may take; ``part`` divides both."""
        share = self._max_rows // part - self.rows_promoting - self.reservations.rows
        return share, state.max_loading_rows // part - state.loading_rows

    def _loads_from(self, state: TierState) -> bool:
        """Return True if a load from a tier is queued, or runs and has not failed."""
        running = (promotion.awaited and not promotion.ended for promotion in self._running.get(state.rank, ()))
        return any(promotion.state is state for promotion in self._queued.values()) or any(running)

    def _start(self, state: TierState, request: Request, keys: Sequence[OffloadKey]) -> int:
        """Promote ``keys``, for which there is room, and return their number."""
        chosen = list(keys)
        taken = self._primary.allocate(chosen)
        if taken is None:
            return 0
        rows, evicted = taken
        if len(rows) < len(chosen):
            chosen = list(dict.fromkeys(chosen))
        self._broker.evicted(evicted)
        deadline = state.traits.deadline(self._clock(), load=True)
        new = Promotion(state, request, [], [], deadline)
        promotion = self._queued.setdefault((state.rank, request.ctx.req_id), new)
        promotion.keys += chosen
        promotion.rows += rows.tolist()
        self._in_flight.update(dict.fromkeys(chosen, promotion))
        request.asked.update(chosen)
        self.rows_promoting += len(chosen)
        state.begin_load(len(chosen), self._clock())
        return len(keys)

    @property
    def queued(self) -> bool:
        """True if promotions wait for the end of the step."""
        return bool(self._queued)

    def take_queued(self) -> Iterator[Promotion]:
        """Yield each queued promotion, which is running from then on."""
        queued, self._queued = self._queued, {}
        for promotion in queued.values():
            for part in self._divide(promotion):
                self._running.setdefault(part.state.rank, deque()).append(part)
                self.next_deadline = min(self.next_deadline, part.deadline)
                yield part

    def _divide(self, promotion: Promotion) -> Iterator[Promotion]:
        """Yield the parts of a promotion, head first, each no longer than its tier's longest load."""
        keys, rows, others = promotion.keys, promotion.rows, promotion.others
        most = promotion.state.traits.max_load_blocks or len(keys)
        if len(keys) <= most:
            yield promotion
            return
        for start in range(0, len(keys), most):
            chosen = keys[start : start + most]
            asked = {key: others[key] for key in chosen if key in others} if others else {}
            part = Promotion(
                promotion.state, promotion.owner, chosen, rows[start : start + most], promotion.deadline, asked
            )
            self._in_flight.update(dict.fromkeys(chosen, part))
            yield part

    def end(self, promotion: Promotion, arrived: Collection[OffloadKey] | None) -> tuple[list[OffloadKey], Rows]:
        """End a promotion whose job the tier has reported.

        Args:
            promotion: the promotion.
            arrived: those of its keys that were loaded; None: all of them.

        Returns:
            The keys that became readable, and their rows.
        """
        keys, rows = promotion.keys, as_rows(promotion.rows)
        promotion.ended = True
        running = self._running.get(promotion.state.rank, ())
        while running and running[0].ended:
            running.popleft()
        promotion.state.loading_rows -= len(keys)
        if promotion.awaited:
            self.rows_promoting -= promotion.state.await_fewer(len(keys))
        loaded = [True] * len(keys) if arrived is None else list(map(arrived.__contains__, keys))
        if not promotion.awaited:
            return self._end_unawaited(promotion, rows, np.array(loaded, np.bool_))
        good_keys, good_rows = keys, rows
        if False in loaded:
            good = np.array(loaded, np.bool_)
            good_keys, good_rows = list(compress(keys, loaded)), rows[good]
            bad_keys = list(compress(keys, map(not_, loaded)))
            self._primary.abort(bad_keys, rows[~good])
            self._note_failed(promotion, bad_keys)
        self._release_waiters(promotion)
        if good_keys:
            self._primary.commit(good_keys, good_rows)
            self._reserve_all(promotion, good_keys, good_rows)
        return good_keys, good_rows

    def _end_unawaited(
        self, promotion: Promotion, rows: Rows, good: NDArray[np.bool_]
    ) -> tuple[list[OffloadKey], Rows]:
        worthless, known = promotion.worthless, (self._readable, self._pending)
        good &= [not (worthless or key in known[0] or key in known[1]) for key in promotion.keys]
        self._primary.end_writing(rows[~good])
        kept = [key for key, ok in zip(promotion.keys, good.tolist(), strict=True) if ok]
        if kept:
            self._stats.promotions_adopted += len(kept)
            self._primary.adopt(kept, rows[good])
        return kept, rows[good]

    def _release_waiters(self, promotion: Promotion) -> None:
        deque(map(self._in_flight.pop, promotion.keys, repeat(None)), maxlen=0)
        _end_waits(promotion)

    def _note_failed(self, promotion: Promotion, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier failed to load ``keys``; its requests do not look there for them again."""
        rank = promotion.state.rank
        promotion.owner.failed.setdefault(rank, set()).update(keys)
        for key in keys:
            for request in promotion.others.get(key, ()):
                request.failed.setdefault(rank, set()).add(key)

    def _reserve_all(self, promotion: Promotion, keys: list[OffloadKey], rows: Rows) -> None:
        self.reservations.reserve(promotion.owner, keys, rows)
        rank = promotion.state.rank
        promotion.owner.brought.update(dict.fromkeys(keys, rank))
        if promotion.others:
            row_of = dict(zip(keys, rows.tolist(), strict=True))
            wanted: dict[Request, list[OffloadKey]] = {}
            for key, requests in promotion.others.items():
                if key in row_of:
                    for request in requests:
                        # A request that inherited the promotion is also in others.
                        if request is not promotion.owner and key not in request.refused:
                            wanted.setdefault(request, []).append(key)
            for request, its_keys in wanted.items():
                self.reservations.reserve(request, its_keys, as_rows([row_of[key] for key in its_keys]))
                request.brought.update(dict.fromkeys(its_keys, rank))

    def expire(self, now: float) -> None:
        """Fail running promotions that are overdue at ``now``, and end the waits for rows that are over."""
        if now >= self.next_deadline:
            self._expire(now)
        if now >= self.waiters.first_end:
            self.waiters.expire(now)

    def _expire(self, now: float) -> None:
        self.next_deadline = math.inf
        for running in self._running.values():
            while running and (running[0].ended or running[0].deadline <= now):
                promotion = running.popleft()
                if not promotion.ended and promotion.awaited:
                    self._stats.promotions_overdue += len(promotion.keys)
                    self.fail(promotion, promotion.state.lateness(promotion.deadline))
            if running:
                self.next_deadline = min(self.next_deadline, running[0].deadline)

    def fail(self, promotion: Promotion, why: Refusal = Refusal.FAILED) -> None:
        """Make a running promotion a miss for its requests; its rows stay quarantined until the job has ended.

        Until then, the rows count against the tier's own share only: a tier that hangs must not keep the other tiers
        from promoting.
        """
        self._release_waiters(promotion)
        promotion.awaited = False
        self.rows_promoting -= promotion.state.await_fewer(len(promotion.keys))
        promotion.owner.awaited = None
        promotion.owner.refused.update(dict.fromkeys(promotion.keys, why))
        for key, requests in promotion.others.items():
            for request in requests:
                request.awaited = None
                request.refused[key] = why
        self._primary.disown(promotion.keys, as_rows(promotion.rows))

    def fail_all(self, state: TierState) -> None:
        """Fail all running promotions from a tier that is out of service until a restart."""
        for promotion in self._running.get(state.rank, ()):
            if promotion.awaited and not promotion.ended:
                self.fail(promotion)

    def release(self, request: Request) -> None:
        """Release a finished request's reservations; its queued promotions get new owners or are dropped."""
        self.reservations.release(request)
        self.waiters.end(request)
        if self._queued:
            for queue_key in [queue_key for queue_key, promotion in self._queued.items() if promotion.owner is request]:
                self._pass_on(self._queued.pop(queue_key))
        request.asked.clear()

    def _pass_on(self, promotion: Promotion) -> None:
        """Give each key of a queued promotion to the first other unfinished request that asked for it."""
        heirs: dict[Request, list[int]] = {}
        dropped: list[int] = []
        for index, key in enumerate(promotion.keys):
            others = promotion.others.get(key, ())
            heir = next((request for request in others if not request.finished), None)
            (dropped if heir is None else heirs.setdefault(heir, [])).append(index)
        for heir, indices in heirs.items():
            self._inherit(promotion, heir, indices)
        if dropped:
            keys = [promotion.keys[index] for index in dropped]
            self._drop(promotion, keys, as_rows([promotion.rows[index] for index in dropped]))

    def _inherit(self, promotion: Promotion, heir: Request, indices: Sequence[int]) -> None:
        new = Promotion(promotion.state, heir, [], [], promotion.deadline)
        inherited = self._queued.setdefault((promotion.state.rank, heir.ctx.req_id), new)
        keys = [promotion.keys[index] for index in indices]
        inherited.keys += keys
        inherited.rows += [promotion.rows[index] for index in indices]
        inherited.others.update((key, promotion.others[key]) for key in keys)
        self._in_flight.update(dict.fromkeys(keys, inherited))

    def _drop(self, promotion: Promotion, keys: Sequence[OffloadKey], rows: Rows) -> None:
        for key in keys:
            self._in_flight.pop(key, None)
        self._stats.promotions_dropped += len(keys)
        self.rows_promoting -= promotion.state.await_fewer(len(keys))
        promotion.state.drop_load(len(keys), self._clock())
        self._primary.abort(keys, rows)

    def drop_queued(self) -> None:
        """Drop all promotions that are not submitted yet, for a reset."""
        for promotion in self._queued.values():
            _end_waits(promotion)
            self._drop(promotion, promotion.keys, as_rows(promotion.rows))
        self._queued.clear()

    def reset(self, running: Iterable[Promotion]) -> None:
        """Drop queued promotions, and the blocks that ``running`` ones still bring; end all reservations.

        The caller empties the primary table after this.
        """
        self.drop_queued()
        for promotion in running:
            if promotion.awaited:
                self.fail(promotion)
            promotion.worthless = True
        self._running.clear()
        self.waiters.clear()
        self.reservations.clear()


def _end_waits(promotion: Promotion) -> None:
    """Let no request wait for the blocks of a promotion any more, so that each searches anew."""
    promotion.owner.asked.difference_update(promotion.keys)
    promotion.owner.awaited = None
    for key, requests in promotion.others.items():
        for request in requests:
            request.asked.discard(key)
            request.awaited = None

"""Promotions: bringing blocks from secondary tiers into primary rows, for those who asked for them.

A promotion takes its rows at once, so that a second request sees the block in flight, but is submitted at the end of
the step: one job per (tier, request).  The first asker owns it; if it leaves, another inherits.  What arrives is
reserved (pinned) for its askers until they load it, finish, or the reservation expires, so that promotions cannot evict
each other for ever; the rows that promotions and reservations hold are bounded.  A promotion that is overdue is a miss
for its askers at once; its rows come back when the tier reports the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.transfer import Rows, as_rows
from tiering.manager.requests import Request, TierState
from tiering.manager.stats import ManagerStats
from tiering.primary.manager import CPUPrimaryTierOffloadingManager


@dataclass(slots=True, eq=False)
class Promotion:
    """Blocks on their way from one tier into primary rows.

    ``others``: further requests that asked for a key, in the order of their asking.  ``awaited``: somebody still counts
    on it (the keys are pending in the primary table); otherwise its rows are quarantined.  ``worthless``: a reset came;
    what arrives is dropped. ``ended``: its job was reported.
    """

    state: TierState
    owner: Request
    keys: list[OffloadKey]
    rows: list[int]
    deadline: float
    others: dict[OffloadKey, list[Request]] = field(default_factory=dict)
    awaited: bool = True
    worthless: bool = False
    ended: bool = False


class Promotions:
    """All promotions of a manager, queued and running, and the reservations that they end in."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        stats: ManagerStats,
        clock: Callable[[], float],
        max_rows: int,
        reservation_deadline: float,
    ) -> None:
        """``max_rows``: rows that promotions and reservations may hold together; ``reservation_deadline``: seconds."""
        self._primary = primary
        self._table = primary.table
        self._stats = stats
        self._clock = clock
        self._max_rows = max_rows
        self._reservation_deadline = reservation_deadline
        self._in_flight: dict[OffloadKey, Promotion] = {}
        self._queued: dict[tuple[int, str], Promotion] = {}
        self._running: dict[int, deque[Promotion]] = {}
        self._expiries: deque[tuple[float, Request, list[OffloadKey]]] = deque()
        self._reservations: NDArray[np.int32] = np.zeros(primary.num_rows, np.int32)
        self.rows_promoting = 0
        self.rows_reserved = 0

    # -------------------------------------------------------------------------------------------------------------- ask

    def join(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        """``request`` waits for ``keys``, which are pending in the primary table (those that are being stored are nobody's promotion)."""
        if request.asked.issuperset(keys):
            return
        for key in keys:
            promotion = self._in_flight.get(key)
            if promotion is not None and key not in request.asked:
                request.asked.add(key)
                promotion.others.setdefault(key, []).append(request)

    def start(self, state: TierState, request: Request, keys: Sequence[OffloadKey]) -> int:
        """Promote the leading ``keys``, held by a tier and unknown to the primary table, as far as there is room.

        Returns how many; the first that found no room is refused to this request from now on, and counted.
        """
        count = min(
            len(keys),
            self._max_rows - self.rows_promoting - self.rows_reserved,
            state.max_loading_rows - state.loading_rows,
            self._table.room,
        )
        if count < len(keys):
            self._stats.promotions_without_room += 1
            request.refused.add(keys[max(count, 0)])
        if count <= 0:
            return 0
        chosen = list(keys[:count])
        taken = self._primary.allocate(chosen)
        if taken is None:
            request.refused.add(keys[0])
            return 0
        rows, evicted = taken
        self._stats.evicted_blocks += len(evicted)
        queue_key = (state.rank, request.ctx.req_id)
        promotion = self._queued.get(queue_key)
        if promotion is None:
            promotion = self._queued[queue_key] = Promotion(state, request, [], [], state.deadline(self._clock()))
        promotion.keys += chosen
        promotion.rows += rows.tolist()
        self._in_flight.update(dict.fromkeys(chosen, promotion))
        request.asked.update(chosen)
        self.rows_promoting += count
        state.loading_rows += count
        return count

    # --------------------------------------------------------------------------------------------------------- run, end

    @property
    def queued(self) -> bool:
        """Whether promotions wait for the end of the step."""
        return bool(self._queued)

    def take_queued(self) -> list[Promotion]:
        """The promotions to submit now."""
        promotions = list(self._queued.values())
        self._queued.clear()
        for promotion in promotions:
            self._running.setdefault(promotion.state.rank, deque()).append(promotion)
        return promotions

    def end(self, promotion: Promotion, arrived: Sequence[OffloadKey] | None) -> tuple[list[OffloadKey], Rows]:
        """A promotion's job has ended: ``arrived`` of its keys (None: all) are good.  Returns what is readable now, and its rows."""
        keys, rows = promotion.keys, as_rows(promotion.rows)
        promotion.ended = True
        promotion.state.loading_rows -= len(keys)
        if promotion.awaited:
            self.rows_promoting -= len(keys)
        good = np.ones(len(keys), np.bool_)
        if arrived is not None:
            arrived_set = frozenset(arrived)
            good = np.fromiter(map(arrived_set.__contains__, keys), np.bool_, len(keys))
        if not promotion.awaited:
            return self._end_unawaited(promotion, rows, good)
        if good.all():
            good_keys, good_rows = keys, rows
        else:
            good_keys = [key for key, ok in zip(keys, good.tolist(), strict=True) if ok]
            bad_keys = [key for key, ok in zip(keys, good.tolist(), strict=True) if not ok]
            good_rows = rows[good]
            self._table.abort(bad_keys, rows[~good])
            self._fail(promotion, bad_keys)
        self._forget(promotion)
        if good_keys:
            self._primary.commit(good_keys, good_rows)
            self._reserve_all(promotion, good_keys, good_rows)
        return good_keys, good_rows

    def _end_unawaited(
        self, promotion: Promotion, rows: Rows, good: NDArray[np.bool_]
    ) -> tuple[list[OffloadKey], Rows]:
        readable, pending = self._table.readable, self._table.pending
        if promotion.worthless:
            good[:] = False
        for index, key in enumerate(promotion.keys):
            if good[index] and (key in readable or key in pending):
                good[index] = False
        self._table.end_writing(rows[~good])
        kept = [key for key, ok in zip(promotion.keys, good.tolist(), strict=True) if ok]
        if kept:
            self._stats.promotions_adopted += len(kept)
            self._primary.adopt(kept, rows[good])
        return kept, rows[good]

    def _forget(self, promotion: Promotion) -> None:
        for key in promotion.keys:
            self._in_flight.pop(key, None)
        promotion.owner.asked.difference_update(promotion.keys)
        for key, requests in promotion.others.items():
            for request in requests:
                request.asked.discard(key)

    def _fail(self, promotion: Promotion, keys: Sequence[OffloadKey]) -> None:
        """The tier did not bring ``keys``: it does not answer yes for them again to those who asked."""
        rank = promotion.state.rank
        promotion.owner.failed.setdefault(rank, set()).update(keys)
        for key in keys:
            for request in promotion.others.get(key, ()):
                request.failed.setdefault(rank, set()).add(key)

    # ----------------------------------------------------------------------------------------------------- reservations

    def _reserve_all(self, promotion: Promotion, keys: list[OffloadKey], rows: Rows) -> None:
        self._reserve(promotion.owner, keys, rows)
        medium = promotion.state.tier.medium
        promotion.owner.brought.update(dict.fromkeys(keys, medium))
        if promotion.others:
            row_of = dict(zip(keys, rows.tolist(), strict=True))
            wanted: dict[Request, list[OffloadKey]] = {}
            for key, requests in promotion.others.items():
                if key in row_of:
                    for request in requests:
                        if request is not promotion.owner:  # an heir is among those who asked
                            wanted.setdefault(request, []).append(key)
            for request, its_keys in wanted.items():
                self._reserve(request, its_keys, as_rows([row_of[key] for key in its_keys]))
                request.brought.update(dict.fromkeys(its_keys, medium))

    def _reserve(self, request: Request, keys: list[OffloadKey], rows: Rows) -> None:
        if request.finished:
            return
        self._table.pin(rows)
        reservations = self._reservations[rows]
        self.rows_reserved += len(rows) - int(np.count_nonzero(reservations))
        self._reservations[rows] = reservations + 1
        request.reserved.update(zip(keys, rows.tolist(), strict=True))
        self._expiries.append((self._clock() + self._reservation_deadline, request, keys))

    def claim(self, request: Request, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """``request`` loads ``keys`` now: their reservations become the protection of the load, the others are pinned."""
        reserved = np.array([request.reserved.pop(key, None) is not None for key in keys], np.bool_)
        self._uncount(rows[reserved])
        if not reserved.all():
            self._table.pin(rows[~reserved])

    def release(self, request: Request) -> None:
        """``request`` needs its reservations no more."""
        if request.reserved:
            self._unreserve(request, list(request.reserved))

    def _unreserve(self, request: Request, keys: Sequence[OffloadKey]) -> int:
        rows = [row for key in keys if (row := request.reserved.pop(key, None)) is not None]
        if rows:
            self._uncount(as_rows(rows))
            self._table.unpin(as_rows(rows))
        return len(rows)

    def _uncount(self, rows: Rows) -> None:
        reservations = self._reservations[rows] - 1
        self._reservations[rows] = reservations
        self.rows_reserved -= len(rows) - int(np.count_nonzero(reservations))

    # ----------------------------------------------------------------------------------------------- deadlines, leaving

    def expire(self, now: float) -> None:
        """Give up what is overdue: running promotions become a miss for their askers, reservations end."""
        for running in self._running.values():
            while running and (running[0].ended or running[0].deadline <= now):
                promotion = running.popleft()
                if not promotion.ended and promotion.awaited:
                    self._stats.promotions_overdue += len(promotion.keys)
                    self.give_up(promotion)
        while self._expiries and self._expiries[0][0] <= now:
            _, request, keys = self._expiries.popleft()
            self._stats.reservations_expired += self._unreserve(request, keys)

    def give_up(self, promotion: Promotion) -> None:
        """Nobody waits for a running promotion any more: a miss for its askers; the rows stay away until its job has ended.

        Until then they count against the tier's own share only: a tier that hangs must not keep the others from
        promoting.
        """
        self._forget(promotion)
        promotion.awaited = False
        self.rows_promoting -= len(promotion.keys)
        promotion.owner.refused.update(promotion.keys)
        for key, requests in promotion.others.items():
            for request in requests:
                request.refused.add(key)
        self._table.disown(promotion.keys, as_rows(promotion.rows))

    def leave(self, request: Request) -> None:
        """``request`` has finished: its reservations end; its queued promotions pass to other askers, or are dropped."""
        self.release(request)
        for queue_key in [queue_key for queue_key, promotion in self._queued.items() if promotion.owner is request]:
            self._pass_on(self._queued.pop(queue_key))
        request.asked.clear()

    def _pass_on(self, promotion: Promotion) -> None:
        """A queued promotion without its owner: each key goes to the first other asker that is still there."""
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
        queue_key = (promotion.state.rank, heir.ctx.req_id)
        inherited = self._queued.get(queue_key)
        if inherited is None:
            inherited = self._queued[queue_key] = Promotion(promotion.state, heir, [], [], promotion.deadline)
        keys = [promotion.keys[index] for index in indices]
        inherited.keys += keys
        inherited.rows += [promotion.rows[index] for index in indices]
        inherited.others.update((key, promotion.others[key]) for key in keys)
        self._in_flight.update(dict.fromkeys(keys, inherited))

    def _drop(self, promotion: Promotion, keys: Sequence[OffloadKey], rows: Rows) -> None:
        for key in keys:
            self._in_flight.pop(key, None)
        self._stats.promotions_dropped += len(keys)
        self.rows_promoting -= len(keys)
        promotion.state.loading_rows -= len(keys)
        self._table.abort(keys, rows)

    def drop_queued(self) -> None:
        """Forget what is not submitted yet (a reset)."""
        for promotion in self._queued.values():
            promotion.owner.asked.difference_update(promotion.keys)
            for key, requests in promotion.others.items():
                for request in requests:
                    request.asked.discard(key)
            self._drop(promotion, promotion.keys, as_rows(promotion.rows))
        self._queued.clear()

    def reset(self, running: Iterable[Promotion]) -> None:
        """A reset: whatever ``running`` promotions still bring is worthless.  The caller empties the primary table after this."""
        self.drop_queued()
        for promotion in running:
            if promotion.awaited:
                self.give_up(promotion)
            promotion.worthless = True
        self._running.clear()
        for _, request, keys in self._expiries:
            self._unreserve(request, keys)
        self._expiries.clear()

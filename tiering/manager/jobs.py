"""Jobs of the secondary tiers: cascades of readable blocks, and the loads of promotions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress, count, islice

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.api.transfer import Rows
from tiering.manager.answers import CREDIT, PLAIN, POSITIONS, PROCESS_ENDS, SECONDS, BreachError, text_of, truth
from tiering.manager.cascade_queue import AT_ONCE, NOBODY
from tiering.manager.late_copies import LateCopies
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.promotions import Promotion, Promotions
from tiering.manager.requests import Request
from tiering.manager.reservations import Reservations
from tiering.manager.row_broker import RowBroker
from tiering.manager.tier_state import TAKES_ALL, TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import HELD_FOR, JobResult, TransferJob

_NO_KEYS: frozenset[OffloadKey] = frozenset()

COUNTS_OVERDUE = 60.0
"""Seconds beyond its deadline for which a job keeps an idle engine stepping.

The I/O of most overdue jobs ends within this time, because requests to shared media have time limits of their own.
"""


class TierJobs:
    """The jobs of a manager in its tiers, and the cascades that wait for blocks to become readable.

    A cascade offers readable blocks to tiers. The rows of a job are pinned until its tier has reported it; blocks that
    wait for a tier's credit are queued, and pulled at the end of a step. A tier with the request-level policy wants all
    blocks of a request. Blocks that another request is storing are *awaited*, and
    cascaded as soon as they are readable.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: SecondaryTiers,
        promotions: Promotions,
        reservations: Reservations,
        broker: RowBroker,
        stats: ManagerStats,
        clock: Callable[[], float],
    ) -> None:
        """Create the jobs of one manager.

        Args:
            primary: the primary tier, whose rows the jobs read and write.
            tiers: the secondary tiers.
            promotions: the promotions, which this class submits and ends.
            reservations: the reservations of promoted blocks, which this class lets expire.
            broker: holds the rows of blocks that wait for a tier's credit.
            stats: the manager's counters.
            clock: monotonic clock, in seconds.
        """
        self.collected = False
        """True if finished jobs were collected in this step."""
        self._primary = primary
        self._readable = primary.readable
        self._pending = primary.pending
        self._states = tiers.states
        self._tiers = tiers
        self._ask = tiers.ask
        self._promotions = promotions
        self._reservations = reservations
        self._broker = broker
        self._stats = stats
        self._clock = clock
        self._ids = count(1)
        self._loads: dict[int, Promotion] = {}
        """Promotions whose tier has not reported their load, by number of the job."""
        self._together = 0
        """Largest number of blocks of the cascades that become one job per tier; 0: each becomes a job."""
        self._gathered: dict[TierState, tuple[dict[OffloadKey, None], list[Rows]]] = {}
        """Blocks of these cascades, which have credit and are not submitted yet."""
        self.awaited: dict[Request, dict[OffloadKey, None]] = {}
        """Per request, the blocks that it needs and other requests are writing.

        Only the methods of this class change the dictionary.
        """
        self.late_copies = LateCopies(tiers.states)
        """Blocks that may need no late store."""

    def __len__(self) -> int:
        return sum(len(state.jobs) for state in self._states)

    def cascade(
        self,
        states: Iterable[TierState],
        keys: Sequence[OffloadKey],
        rows: Rows,
        ctx: ReqContext,
        *,
        is_fill: bool = False,
    ) -> None:
        """Offer blocks to tiers.

        A tier that has no credit for all admitted blocks gets the others when the manager pulls them from its queue.

        Args:
            states: the tiers; those out of service are left out.
            keys: readable blocks.
            rows: rows of the blocks, co-indexed with ``keys``.
            ctx: the request that the blocks are stored for.
            is_fill: True if the blocks were just promoted from a slower tier; default False.
        """
        for state in states:
            if state.in_service:
                self._offer(state, keys, rows, ctx, is_fill=is_fill)

    def _offer(
        self, state: TierState, keys: Sequence[OffloadKey], rows: Rows, ctx: ReqContext, *, is_fill: bool
    ) -> None:
        """Submit those blocks that a tier admits and has credit for; queue the others that it admits."""
        queue, now = state.queue, self._clock()
        if queue.lane_of and (new := queue.new(keys)) is not keys:
            keys, rows = new, self._rows_of(new)
        keys = tuple(keys)
        count = len(keys)
        if state.intake is not TAKES_ALL:
            keys, rows = self._admitted(state, keys, rows, ctx, is_fill=is_fill)
            count = 0 if queue.lane_of else self._take_credit(state, len(keys))
        if count:
            if self._together and state.traits.mixes_requests and count < AT_ONCE and not is_fill:
                self._gather(state, keys[:count], rows[:count])
            else:
                self._submit_pinned(state, keys[:count], rows[:count], ctx, now, is_fill=is_fill)
        if count < len(keys) and state.in_service:
            if not queue.lane_of:
                state.queued_since = now
            queue.append(ctx, keys[count:], is_fill=is_fill)
            waiting = rows[count:]
            state.has[waiting], state.settled_until[waiting] = False, math.inf
            self._broker.hold(state, waiting)

    def _admitted(
        self, state: TierState, keys: tuple[OffloadKey, ...], rows: Rows, ctx: ReqContext, *, is_fill: bool
    ) -> tuple[tuple[OffloadKey, ...], Rows]:
        """Return those blocks that a tier wants to store."""
        chosen = self._ask(state, POSITIONS, state.intake.admit, keys, ctx, is_fill) if keys else None
        if chosen is None:
            return (), rows
        if len(chosen) == len(keys):
            return keys, rows
        admitted = tuple([keys[position] for position in chosen])
        self._tiers.note_unstored(state, keys, admitted)
        return admitted, rows[chosen]

    def _submit_pinned(
        self, state: TierState, keys: tuple[OffloadKey, ...], rows: Rows, ctx: ReqContext, now: float, *, is_fill: bool
    ) -> None:
        self._primary.pin(rows)
        rows.flags.writeable = False
        self._submit_store(state, keys, rows, ctx, now, is_fill=is_fill)

    def begin_together(self, blocks: int) -> None:
        """Let the next ``blocks`` that are offered become one job of a tier that mixes requests."""
        self._together = blocks

    def submit_together(self) -> None:
        """Submit the blocks that were offered since :meth:`begin_together`."""
        self._together, gathered, self._gathered = 0, self._gathered, {}
        for state in self._states:
            state.credit = 0  # the tier was asked about these blocks only
            if state in gathered:
                self._submit_gathered(state, *gathered[state])

    def _gather(self, state: TierState, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """Keep admitted blocks, for which there is credit, until the last store of the step is offered."""
        if state in self._gathered:
            gathered = self._gathered[state][0]
            if len(gathered) + len(keys) > AT_ONCE or not gathered.keys().isdisjoint(keys):
                self._submit_gathered(state, *self._gathered.pop(state))
        gathered, parts = self._gathered.setdefault(state, ({}, []))
        gathered.update(dict.fromkeys(keys))
        parts.append(rows)

    def _submit_gathered(self, state: TierState, keys: Iterable[OffloadKey], rows: Sequence[Rows]) -> None:
        self._submit_pinned(state, tuple(keys), np.concatenate(rows), NOBODY, self._clock(), is_fill=False)

    def _take_credit(self, state: TierState, wanted: int) -> int:
        """Return how many of ``wanted`` blocks may be submitted now, and take them off the credit."""
        if state.credit < wanted and state not in self._gathered:  # the tier does not count gathered blocks
            self._ask_credit(state, max(wanted, self._together))
        count = min(state.credit, wanted)
        state.credit -= count
        return count

    def _ask_credit(self, state: TierState, wanted: int) -> None:
        """Set the credit of a tier, ``wanted`` blocks at most: it is for these and ends with them."""
        state.credit = self._ask(state, CREDIT, state.intake.credit, wanted, 2 * self._broker.longest_step) or 0

    def pull(self) -> None:
        """Submit queued blocks to the tiers that have credit for them, at the end of a step."""
        now, busy = self._clock(), False
        if self._broker.stepped_at < math.inf:
            self._broker.end_step(now)
        for state in self._states:
            if state.queue.lane_of and state.in_service:
                self._pull(state, now)
            if state.jobs:
                busy = True
        if busy:
            self._broker.begin_step(now)

    def _pull(self, state: TierState, now: float) -> None:
        self._ask_credit(state, len(state.queue))
        while state.queue and state.credit > 0 and state.in_service:
            ctx, is_fill, taken = state.queue.take(state.credit)
            keys, rows = tuple(taken), self._rows_of(taken)
            rows.flags.writeable = False
            state.credit -= len(keys)
            state.queued_since = now
            state.settled_until[rows] = 0.0
            self._broker.pass_on(state, keys, rows)
            self._submit_store(state, keys, rows, ctx, now, is_fill=is_fill)
        state.credit = 0
        self._tiers.end_requests(state)

    def _submit_store(
        self, state: TierState, keys: tuple[OffloadKey, ...], rows: Rows, ctx: ReqContext, now: float, *, is_fill: bool
    ) -> None:
        """Submit a store of pinned rows, which is an array that the tier cannot change."""
        state.cascading_rows += len(rows)
        job = TransferJob(next(self._ids), keys, rows, False, ctx, now, is_fill, state.traits.deadline(now, load=False))
        self._submit(state, state.tier.submit_store, job)

    def _rows_of(self, keys: Sequence[OffloadKey]) -> Rows:
        """Return the rows of readable blocks."""
        return np.fromiter(self._readable.rows(keys), np.int64, len(keys))

    @property
    def queued_in_time(self) -> bool:
        """True if blocks are queued for a tier that has taken some lately, or still may."""
        now = self._clock()
        return any(
            state.queue and state.in_service and now < state.traits.deadline(state.queued_since, load=False)
            for state in self._states
        )

    def drain(self, state: TierState, deadline: float) -> None:
        """Let a tier end its jobs and take its queued blocks, until ``deadline`` or until it takes no more."""
        waited = False
        while True:
            before = len(state.queue)
            if before and state.in_service:
                self._pull(state, self._clock())
                self._tiers.call(state, state.tier.on_schedule_end)
            self._tiers.call(state, state.tier.drain, deadline)
            ends = waited and len(state.queue) == before
            if ends or not state.queue or not state.in_service or self._clock() >= deadline:
                return
            self.collect()
            waited = True

    def drop_all(self) -> int:
        """Empty the queues of all tiers, and return the number of blocks that were in them."""
        dropped = 0
        for state in self._states:
            if state.queue:
                dropped += self._broker.empty(state)
                self._tiers.end_requests(state)
        return dropped

    def cascade_held(self, states: Iterable[TierState], keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Offer those of ``keys`` that are readable to tiers, as :meth:`cascade` does."""
        held = [key for key in dict.fromkeys(keys) if key in self._readable]
        if held:
            self.cascade(states, held, self._rows_of(held), ctx)

    def submit_promotions(self) -> None:
        """Submit each queued promotion as one load job; a long one as several jobs with the same deadline."""
        now = self._clock()
        for promotion in self._promotions.take_queued():
            state, rows = promotion.state, np.array(promotion.rows, np.int64)
            rows.flags.writeable = False
            ctx, deadline = promotion.owner.ctx, state.traits.deadline(now, load=True)
            job = TransferJob(next(self._ids), tuple(promotion.keys), rows, True, ctx, now, False, deadline)
            self._loads[job.job_id] = promotion
            self._submit(state, state.tier.submit_load, job)

    def _submit(self, state: TierState, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        state.jobs[job.job_id] = job
        if not state.in_service:
            self._end(state, JobResult(job.job_id, False))
            return
        try:
            submit(job)
        except BaseException as error:
            self._tiers.fail_raising(state, submit, error)

    def collect(self) -> None:
        """Take the finished jobs of all tiers, and expire overdue promotions and reservations."""
        self.collected = True
        for state in self._states:
            results: list[JobResult] = []
            given: Iterable[JobResult] = ()
            try:
                given = state.tier.get_finished()
                if type(given) in PLAIN and not given:
                    continue
                # What a generator returned before it raised counts. One that never ends must not be followed.
                results += islice(given, len(state.jobs) + 1)
            except BaseException as error:
                self._tiers.fail_reading(state, state.tier.get_finished, given, error)
            for result in results:
                self._end(state, result)
        now = self._clock()
        self._promotions.expire(now)
        if now >= self._reservations.next_expiry:
            self._reservations.expire(now)

    def _end(self, state: TierState, result: JobResult) -> None:
        try:
            job, success, arrived = self._read(state, result)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            # Nothing is released: perhaps the tier still uses the rows of this job.
            self._stats.misreported_jobs += 1
            breach = str(error) if type(error) is BreachError else ""
            self._tiers.fail(
                state, breach or f"its get_finished returned {text_of(result)} instead of the result of a job"
            )
            return
        del state.jobs[job.job_id]
        if job.is_promotion:
            promotion = self._loads.pop(job.job_id)
            state.load_ended = now = self._clock()
            if state.gate is not None:
                seconds = result.transfer_time
                ended = now if type(seconds) is not float else min(now, job.submitted_at + max(0.0, seconds))
                state.gate.end(len(job.keys), len(job.keys if arrived is None else arrived), ended)
                if promotion.awaited:
                    promotion.owner.arrived_at = ended
            self._end_promotion(state, promotion, arrived)
            return
        if success and arrived is None:
            self._note_held(state, job.block_ids)
            if self.late_copies.most and self.late_copies.spares and not job.is_fill and state.serves_all:
                self.late_copies.fed(self._primary.spare_held(job.keys, job.block_ids))
        else:
            taken = result.successful_keys
            self._tiers.note_unstored(state, job.keys, taken if taken and type(taken) in PLAIN else ())
        self._primary.unpin(job.block_ids)
        state.cascading_rows -= len(job.block_ids)
        state.cascade_ended = self._clock()

    def _read(self, state: TierState, result: JobResult) -> tuple[TransferJob, bool, frozenset[OffloadKey] | None]:
        """Return the job of a result, its success, and the keys that succeeded.

        None instead of the keys means that all share the fate of ``success``, or that the success of some does not
        matter.

        Raises:
            BreachError: the job is not one of the tier's in flight, or does not have these keys; see the text.
            BaseException: ``result`` is no result of a job.
        """
        job = state.jobs.get(result.job_id)
        success, keys = truth(result.success), result.successful_keys
        if job is None:
            raise BreachError(f"it reported job {text_of(result.job_id)}, which is not one of its own in flight")
        if keys is None:
            return job, success, None if success else _NO_KEYS
        if not job.is_promotion:
            return job, False, _NO_KEYS
        arrived = frozenset(islice(keys, len(job.keys) + 1))
        if not arrived.issubset(job.keys):
            raise BreachError(f"it reported job {job.job_id} with keys that are not of this job")
        return job, success, arrived

    def _end_promotion(self, state: TierState, promotion: Promotion, arrived: Collection[OffloadKey] | None) -> None:
        if not state.in_service and not state.resetting:
            arrived = frozenset()
        keys, rows = self._promotions.end(promotion, arrived)
        self.note_refilled(rows)
        self._note_held(state, rows)
        if keys and not promotion.worthless:
            owner = promotion.owner
            faster = [other for other in owner.tiers if other.rank < state.rank and other.traits.fill]
            # The tiers were promised that a finished request has no further cascades.
            self.cascade(faster, keys, rows, NOBODY if owner.finished else owner.ctx, is_fill=True)

    def _note_held(self, state: TierState, rows: Rows) -> None:
        state.settled_until[rows] = self._clock() + HELD_FOR
        state.has[rows] = True
        self._broker.release(rows)

    def running_promotions(self) -> list[Promotion]:
        """Return the promotions whose tier has not reported the load."""
        return list(self._loads.values())

    def expected(self) -> bool:
        """Return True if a tier has a job whose end is expected.

        A job may be overdue by :data:`COUNTS_OVERDUE` seconds. Nothing is expected of a tier that is out of service
        until a restart.
        """
        latest = self._clock() - COUNTS_OVERDUE
        return any(
            latest < job.deadline
            for state in self._states
            if state.in_service or state.resetting
            for job in state.jobs.values()
        )

    def await_others(self, request: Request, keys: Sequence[OffloadKey], own: Sequence[OffloadKey]) -> None:
        """Note the blocks that ``request`` needs and other requests are writing.

        Args:
            request: the request that a tier wants all blocks of.
            keys: all blocks of the store, in their order.
            own: the part of ``keys`` that this request writes itself; its own store cascades them.
        """
        pending = self._pending
        if len(pending) > len(own):
            others = [key for key in keys if key in pending]
            awaited = dict.fromkeys(set(others).difference(own))
            if awaited:
                self.awaited.setdefault(request, {}).update((key, None) for key in others if key in awaited)

    def drop_awaited(self, request: Request) -> None:
        """Cascade no awaited blocks of ``request`` any more; those that are queued or in flight go on."""
        self.awaited.pop(request, None)

    def cascade_awaited(self) -> list[Request]:
        """Cascade the awaited blocks that are readable now.

        Blocks whose store failed are not awaited any longer.

        Returns:
            The finished requests that a block was decided for.
        """
        decided = []
        for request, keys in list(self.awaited.items()):
            left = {key: None for key in keys if key in self._pending}
            if len(left) == len(keys):
                continue
            if left:
                self.awaited[request] = left
            else:
                del self.awaited[request]
            self.cascade_held(request.wants_all, [key for key in keys if key not in left], request.ctx)
            if request.finished:
                decided.append(request)
        return decided

    def note_refilled(self, rows: Rows) -> None:
        """Note that ``rows`` have new blocks, so that the next use of these blocks is reported to the tiers."""
        for state in self._states:
            state.settled_until[rows] = 0.0

    def report_use(self, keys: Sequence[OffloadKey], rows: Rows, request: Request | None, ctx: ReqContext) -> None:
        """Report the use of readable blocks; a tier that lacks some may ask for them at the step's end.

        Args:
            keys: the blocks.
            rows: rows of the blocks, co-indexed with ``keys``.
            request: the request that uses the blocks; None if it is unknown.
            ctx: the context of that request.
        """
        if not self._states or (request is not None and not request.policy.store):
            return
        now = self._clock()
        for state in self._states if request is None else request.tiers:
            due = state.settled_until.take(rows) <= now
            number = len(due.nonzero()[0])
            if number and state.in_service:
                asked = tuple(keys if number == len(keys) else compress(keys, due.tolist()))
                used = rows[due]
                state.settled_until[used] = now + (self._ask(state, SECONDS, state.intake.used, asked, ctx) or 0.0)
                state.has[used] = False

"""Jobs of the secondary tiers: cascades of readable blocks, and the loads of promotions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.api.transfer import Rows, as_rows
from tiering.manager.answers import PROCESS_ENDS, SECONDS, BreachError, text_of, truth
from tiering.manager.promotions import Promotion, Promotions
from tiering.manager.requests import Request
from tiering.manager.reservations import Reservations
from tiering.manager.stats import ManagerStats
from tiering.manager.tiers import SecondaryTiers, TierState
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import JobResult, TransferJob
from tiering.secondary.intake import HELD_FOR

_NO_ROWS: Rows = as_rows(())
_PLAIN = frozenset((tuple, list))
_NO_KEYS: frozenset[OffloadKey] = frozenset()

COUNTS_OVERDUE = 60.0
"""Seconds beyond its deadline for which a job keeps an idle engine stepping.

The I/O of most overdue jobs ends within this time, because requests to shared media have time limits of their own.
"""

NOBODY = ReqContext("")
"""Context of cascades that belong to no request."""


@dataclass(slots=True, eq=False)
class Job:
    """A job that its tier has not reported yet: a cascade or a promotion."""

    job_id: int
    """Number of the job."""
    state: TierState
    """The tier."""
    rows: Rows
    """Rows that the job reads or writes; those of a cascade are pinned."""
    deadline: float
    """Time by which the tier should have reported the job."""
    promotion: Promotion | None = None
    """The promotion; None for a cascade."""
    gave_up: bool = False
    """True if the tier gave up rows of the cascade before it began them."""
    linked: bool = False
    """True while the job is in a :class:`CascadeOrder`."""
    older: Job | None = None
    """Neighbour in the order."""
    newer: Job | None = None
    """Neighbour in the order."""


class CascadeOrder:
    """The cascades that may be withdrawn, the oldest first, and the place at which the next search begins.

    A search looks at a bounded number of rows. If it finds too few of them to take, the next search goes on behind
    them. Rows that nothing can free, however many, thus keep no search from the rows behind them for ever. Once the
    searches have reached the cascade that was the newest at their begin, they begin again with the oldest.
    """

    def __init__(self) -> None:
        self.rows = 0
        """Number of rows of all these cascades, those included that have begun."""
        self._oldest: Job | None = None
        self._newest: Job | None = None
        self._next: Job | None = None
        self._last = 0

    def append(self, job: Job) -> None:
        """Add the newest cascade."""
        job.linked, job.older = True, self._newest
        if self._newest is None:
            self._oldest = job
        else:
            self._newest.newer = job
        self._newest = job
        self.rows += len(job.rows)

    def remove(self, job: Job) -> None:
        """Remove a cascade, if it is in the order."""
        if not job.linked:
            return
        if job.older is None:
            self._oldest = job.newer
        else:
            job.older.newer = job.newer
        if job.newer is None:
            self._newest = job.older
        else:
            job.newer.older = job.older
        if self._next is job:
            self._next = job.newer
        job.linked, job.older, job.newer = False, None, None
        self.rows -= len(job.rows)

    def shrink(self, job: Job, rows: Rows) -> None:
        """Replace the rows of a cascade that lost some; one without rows is removed."""
        self.rows -= len(job.rows) - len(rows)
        job.rows = rows
        if not len(rows):
            self.remove(job)

    def window(self, rows: int) -> tuple[list[Job], Job | None]:
        """Return the next cascades to look at.

        Args:
            rows: number of rows after which the window ends, with the cascade that reaches it.

        Returns:
            The cascades, the oldest first, and the first one behind them; None if there is none.
        """
        if self._newest is not None and (self._next is None or self._next.job_id > self._last):
            self._next, self._last = self._oldest, self._newest.job_id
        jobs: list[Job] = []
        job = self._next
        while job is not None and rows > 0:
            jobs.append(job)
            rows -= len(job.rows)
            job = job.newer
        return jobs, job

    def go_on(self, job: Job | None) -> None:
        """Begin the next search with ``job``; None: with the oldest cascade."""
        self._next = job


class TierJobs:
    """The jobs of a manager in its tiers, and the cascades that wait for blocks to become readable.

    A cascade offers readable blocks to tiers and pins their rows until every tier has reported its job. A tier with the
    request-level policy wants all blocks of a request. Blocks that another request is storing are *awaited*, and
    cascaded as soon as they are readable.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: SecondaryTiers,
        promotions: Promotions,
        reservations: Reservations,
        stats: ManagerStats,
        clock: Callable[[], float],
    ) -> None:
        """Create the jobs of one manager.

        Args:
            primary: the primary tier, whose rows the jobs read and write.
            tiers: the secondary tiers.
            promotions: the promotions, which this class submits and ends.
            reservations: the reservations of promoted blocks, which this class lets expire.
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
        self._stats = stats
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self.weak = CascadeOrder()
        """Cascades of the tiers that know which of their stores have not begun."""
        self._ids = count(1)
        self.awaited: dict[Request, dict[OffloadKey, None]] = {}
        """Per request, the blocks that it needs and other requests are writing.

        Only the methods of this class change the dictionary.
        """

    def __len__(self) -> int:
        return len(self._jobs)

    # ----------------------------------------------------------------------------------------------------------- submit

    def cascade(
        self,
        states: Iterable[TierState],
        keys: Sequence[OffloadKey],
        rows: Rows,
        ctx: ReqContext,
        *,
        is_fill: bool = False,
    ) -> None:
        """Offer blocks to tiers, one job per tier; the rows are pinned until the jobs are reported.

        Args:
            states: the tiers; those out of service are left out.
            keys: readable blocks.
            rows: rows of the blocks, co-indexed with ``keys``.
            ctx: the request that the blocks are stored for.
            is_fill: True if the blocks were just promoted from a slower tier; default False.
        """
        serving = [state for state in states if state.in_service]
        if not serving:
            return
        self._primary.pin(rows, len(serving))
        # A tier must not change what the engine, the manager and the other tiers use as well.
        keys, shared = tuple(keys), rows.view()
        shared.flags.writeable = False
        for state in serving:
            job_id = next(self._ids)
            now = self._clock()
            self._jobs[job_id] = cascade = Job(job_id, state, rows, _store_deadline(state, now))
            state.cascading_rows += len(rows)
            if state.holds_weakly:
                self.weak.append(cascade)
            job = TransferJob(job_id, keys, shared, False, ctx, now, is_fill)
            self._submit(state, state.tier.submit_store, job)

    def cascade_held(self, states: Iterable[TierState], keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Offer those of ``keys`` that are readable to tiers, as :meth:`cascade` does."""
        held = [key for key in dict.fromkeys(keys) if key in self._readable]
        if held:
            rows = np.fromiter(self._readable.rows(held), np.int64, len(held))
            self.cascade(states, held, rows, ctx)

    def submit_promotions(self) -> None:
        """Submit each queued promotion as one load job; a long one as several jobs with the same deadline."""
        now = self._clock()
        for promotion in self._promotions.take_queued():
            state, rows = promotion.state, np.array(promotion.rows, np.int64)
            rows.flags.writeable = False
            job_id = next(self._ids)
            self._jobs[job_id] = Job(job_id, state, rows, state.deadline(now), promotion)
            job = TransferJob(job_id, tuple(promotion.keys), rows, True, promotion.owner.ctx, now)
            self._submit(state, state.tier.submit_load, job)

    def _submit(self, state: TierState, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        if not state.in_service:
            self._end(state, JobResult(job.job_id, False))
            return
        try:
            submit(job)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            self._tiers.retire_raising(state, submit, error)

    def give_up(self, state: TierState, given: Sequence[tuple[Job, Sequence[int]]]) -> None:
        """Release rows of a tier's cascades that have not begun.

        The tier is told of the next use of their blocks.

        Args:
            state: the tier.
            given: the cascades, each with the rows to release; some of its own.
        """
        released: list[int] = []
        for job, rows in given:
            left: Rows = _NO_ROWS
            if len(rows) < len(job.rows):
                # Most of these jobs have a few rows, for which sets are much cheaper than numpy's functions of sets.
                lost = frozenset(rows)
                left = as_rows([row for row in job.rows.tolist() if row not in lost])
            self.weak.shrink(job, left)
            job.gave_up = True
            released += rows
        # A block may wait in two cascades of the tier, and each of them has pinned the row.
        rounds = [released] if len(set(released)) == len(released) else [rows for _, rows in given]
        for rows in rounds:
            self._primary.unpin(as_rows(rows))
        state.cascading_rows -= len(released)
        state.settled_until[released] = 0.0
        self._stats.cascades_withdrawn += len(released)

    def count_misreport(self) -> None:
        """Count an answer of a tier about jobs or rows that are not its own."""
        self._stats.misreported_jobs += 1

    # ---------------------------------------------------------------------------------------------------------- collect

    def collect(self) -> None:
        """Take the finished jobs of all tiers, and give up overdue promotions and expired reservations."""
        self.collected = True
        for state in self._states:
            results: list[JobResult] = []
            given: Iterable[JobResult] = ()
            try:
                given = state.tier.get_finished()
                if type(given) in _PLAIN and not given:
                    continue
                # What a generator returned before it raised counts. One that never ends must not be followed.
                results += islice(given, len(self._jobs) + 1)
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                self._tiers.retire_reading(state, state.tier.get_finished, given, error)
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
            self.count_misreport()
            breach = str(error) if type(error) is BreachError else ""
            self._tiers.retire(
                state, breach or f"its get_finished returned {text_of(result)} instead of the result of a job"
            )
            return
        del self._jobs[job.job_id]
        self.weak.remove(job)
        if job.promotion is not None:
            self._end_promotion(state, job.promotion, arrived)
            return
        if success and arrived is None:
            self._note_held(state, job.rows)
        if len(job.rows):  # a store that was withdrawn has none
            self._primary.unpin(job.rows)
            state.cascading_rows -= len(job.rows)
            state.cascade_ended = self._clock()

    def _read(self, state: TierState, result: JobResult) -> tuple[Job, bool, frozenset[OffloadKey] | None]:
        """Return the job of a result, its success, and the keys that succeeded.

        None instead of the keys means that all share the fate of ``success``, or that the success of some does not
        matter.

        Raises:
            BreachError: the job is not one of the tier's in flight, or does not have these keys; the text says which.
            BaseException: ``result`` is no result of a job.
        """
        job = self._jobs.get(result.job_id)
        success, keys = truth(result.success), result.successful_keys
        if job is None or job.state is not state:
            raise BreachError(f"it reported job {text_of(result.job_id)}, which is not one of its own in flight")
        if keys is None:
            if success and job.gave_up:
                raise BreachError(f"it reported job {job.job_id} as stored, of which it had given up blocks")
            return job, success, None if success else _NO_KEYS
        if job.promotion is None:
            return job, False, _NO_KEYS
        of_job = job.promotion.keys
        arrived = frozenset(islice(keys, len(of_job) + 1))
        if not arrived.issubset(of_job):
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
            faster = [other for other in owner.tiers if other.rank < state.rank and other.fill]
            # The tiers know that a finished request has no further cascades.
            self.cascade(faster, keys, rows, NOBODY if owner.finished else owner.ctx, is_fill=True)

    def _note_held(self, state: TierState, rows: Rows) -> None:
        state.settled_until[rows] = self._clock() + HELD_FOR
        state.has[rows] = True

    def running_promotions(self) -> list[Promotion]:
        """Return the promotions whose tier has not reported the load."""
        return [job.promotion for job in self._jobs.values() if job.promotion is not None]

    def expected(self) -> bool:
        """Return True if a tier has a job whose end is expected.

        A job may be overdue by :data:`COUNTS_OVERDUE` seconds. Nothing is expected of a tier that is out of service
        until a restart.
        """
        latest = self._clock() - COUNTS_OVERDUE
        return any(
            latest < job.deadline and (job.state.in_service or job.state.resetting) for job in self._jobs.values()
        )

    # --------------------------------------------------------------------------------------------------- awaited blocks

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

    def forget(self, request: Request) -> None:
        """Stop waiting for blocks of ``request``."""
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

    # ------------------------------------------------------------------------------------------------------------- uses

    def note_refilled(self, rows: Rows) -> None:
        """Note that ``rows`` have new blocks, so that tiers are told of the next use of these blocks."""
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
            number = np.count_nonzero(due)
            if number and state.in_service:
                asked = tuple(keys if number == len(keys) else compress(keys, due.tolist()))
                used = rows[due]
                state.settled_until[used] = now + (self._ask(state, SECONDS, state.tier.used, asked, ctx) or 0.0)
                state.has[used] = False


def _store_deadline(state: TierState, now: float) -> float:
    """Return the time by which a store that is submitted at ``now`` should have ended."""
    limit = state.store_deadline
    return state.deadline(now) if limit is None else now + limit

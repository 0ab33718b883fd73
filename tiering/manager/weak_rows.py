"""Rows of waiting cascades, which stores and promotions may take.

A cascade that its tier has not begun holds its rows weakly. A row can be taken if nothing else uses it:

- at once, if another tier has the block, or if the tier has begun no store for a while: one tier in trouble costs the
  others nothing;
- otherwise when the store or the promotion has waited as long as a write takes. A tier that keeps up frees rows by
  itself within that time, and no cascade is lost.

The oldest cascades are given up first, each from the tail of its prefix. A block that loses its cascade is offered to
the tier again when the block is used again.

A search looks at a bounded number of rows, however many cascades wait, and takes several rows at once. Its cost per row
is therefore bounded too. A store that needs more rows than one search has found gets them by the next ones, which go on
behind the rows of the last one and look again at those that it found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import index

import numpy as np
from numpy.typing import NDArray

from tiering.manager.answers import PROCESS_ENDS, UNREAD, BreachError, text_of
from tiering.manager.jobs import Job, TierJobs
from tiering.manager.tiers import SecondaryTiers, TierState
from tiering.primary.manager import CPUPrimaryTierOffloadingManager

TAKE_AFTER = 0.1
"""Seconds after which a row is taken from a cascade of a tier that makes progress.

A write takes about as long.
"""

ROWS_AT_ONCE = 32
"""Number of rows that a search takes at once at most, unless more are needed."""

PART_AT_ONCE = 16
"""Largest quotient of all rows of waiting cascades and the rows taken at once, below that bound."""

LOOK_AT = 256
"""Number of rows that a search looks at; four times the needed rows if these are more."""


class _Waiting:
    """Cascades that have not begun, as the tiers have named them in one search."""

    def __init__(self) -> None:
        self.asked: dict[Job, None] = {}
        """Cascades that their tiers were asked about."""
        self.rows: list[tuple[Job, Sequence[int]]] = []
        """Rows of each cascade, in the order in which they are given up."""
        self.since: dict[TierState, float] = {}
        """For each tier with such cascades, the time since when it has begun no store."""

    def keeps_up(self, now: float) -> bool:
        """Return True if cascades wait, and their tiers have begun a store lately."""
        return bool(self.since) and all(now - since < TAKE_AFTER for since in self.since.values())

    def in_tier(self, state: TierState, rows: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask of the ``rows`` that cascades of one tier hold."""
        held = set(chain.from_iterable([own for job, own in self.rows if job.state is state]))
        # For so few rows, Python's sets cost much less than numpy's functions of sets.
        return np.fromiter(map(held.__contains__, rows), np.bool_, len(rows))


class WeakRows:
    """Takes rows from the waiting cascades of one manager.

    Args:
        primary: the primary tier.
        tiers: the secondary tiers.
        jobs: the jobs of the tiers.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: SecondaryTiers,
        jobs: TierJobs,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._states = tiers.states
        self._tiers = tiers
        self._jobs = jobs
        self._order = jobs.weak
        self._clock = clock
        self._found: list[Job] = []
        """Cascades in which searches have found rows that can be taken, though too few."""

    def make_room(self, count: int, since: float | None, least: int = 1) -> int:
        """Make rows of waiting cascades evictable, and return their number.

        Args:
            count: number of rows that are needed.
            since: time since when the store or promotion waits for rows; None: it does not wait yet.
            least: smallest useful number of rows; if fewer can be taken, none is. Default 1.
        """
        now = self._clock()
        patient = since is None or now - since < TAKE_AFTER
        wanted = max(count, min(ROWS_AT_ONCE, self._order.rows // PART_AT_ONCE))
        chosen: list[int] = []
        waiting = _Waiting()
        if self._found:
            self._look(waiting, [job for job in self._found if job.linked])
        # Where rows can be taken at all, the oldest cascades nearly always suffice.
        for limit in (wanted * (1 + len(self._states)), max(LOOK_AT, 4 * count)):
            jobs, behind = self._order.window(limit)
            self._look(waiting, jobs)
            if patient and len(self._states) == 1 and waiting.keeps_up(now):
                return 0  # No other tier has a block, so that no row can be taken at once.
            chosen = self._choose(waiting, now, patient=patient)[:wanted]
            if len(chosen) == wanted or behind is None:
                break
        if len(chosen) < wanted:
            self._order.go_on(behind)
        taken = frozenset(chosen)
        if len(chosen) < least:
            self._found = [job for job, rows in waiting.rows if not taken.isdisjoint(rows)]
            return 0
        self._found = []
        before = self._primary.room
        self._withdraw(waiting, taken)
        return self._primary.room - before

    def _look(self, waiting: _Waiting, jobs: Iterable[Job]) -> None:
        """Ask the tiers of ``jobs`` which blocks have not begun, and add the answers to ``waiting``.

        A tier is asked about a cascade once in a search, because no time passes meanwhile.
        """
        by_tier: dict[int, list[Job]] = {}
        for job in jobs:
            if job in waiting.asked:
                continue
            waiting.asked[job] = None
            if job.state.in_service:
                by_tier.setdefault(job.state.rank, []).append(job)
            elif not job.state.resetting:
                self._order.remove(job)  # The tier is out of service until a restart.
        for rank, asked in by_tier.items():
            state = self._states[rank]
            answer = self._tiers.ask(state, UNREAD, state.tier.waiting_stores, [job.job_id for job in asked])
            if answer is None or answer[0] is None:
                continue
            try:
                found = _rows_of(asked, answer[0].rows)
                since = float(answer[0].since)
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                self._breach(state, "its waiting_stores returned what is not its own", answer[0], error)
                continue
            if found:
                waiting.rows += found
                waiting.since[state] = min(since, waiting.since.get(state, since))
        if len(waiting.since) > 1:
            waiting.rows.sort(key=_job_id)

    def _choose(self, waiting: _Waiting, now: float, *, patient: bool) -> list[int]:
        """Return the rows that may be taken, in their order.

        Args:
            waiting: the cascades that have not begun.
            now: monotonic seconds.
            patient: True if only those rows may be taken that may be taken at once.
        """
        places = list(chain.from_iterable([rows for _, rows in waiting.rows]))
        if patient:
            places = self._expendable(places, waiting, now)
        if not places:
            return []
        cascades = Counter(places)
        rows = np.fromiter(cascades, np.int64, len(cascades))
        free = self._primary.readers(rows) == np.fromiter(cascades.values(), np.int64, len(cascades))
        chosen: list[int] = rows[free].tolist()
        return chosen

    def _expendable(self, places: list[int], waiting: _Waiting, now: float) -> list[int]:
        """Return those of the rows ``places`` that another tier has, or that wait for tiers in trouble only."""
        rows = np.array(places, np.int64)
        expendable = np.zeros(len(places), np.bool_)
        if any(now - since >= TAKE_AFTER for since in waiting.since.values()):
            expendable[:] = True
            for state, since in waiting.since.items():
                if not now - since >= TAKE_AFTER:
                    expendable &= ~waiting.in_tier(state, places)
        for state in self._states:
            if state.in_service:
                has = state.has[rows] & (state.settled_until[rows] > now)
                if np.count_nonzero(has):
                    expendable |= has & ~waiting.in_tier(state, places) if state in waiting.since else has
        return rows[expendable].tolist() if np.count_nonzero(expendable) else []

    def _withdraw(self, waiting: _Waiting, taken: frozenset[int]) -> None:
        """Let the tiers give up the rows in ``taken``, and release what they give up."""
        asked: dict[int, dict[int, tuple[Job, list[int]]]] = {}
        for job, rows in waiting.rows:
            if not taken.isdisjoint(rows):
                wanted = [row for row in rows if row in taken]
                asked.setdefault(job.state.rank, {})[job.job_id] = (job, wanted)
        for rank in sorted(asked, reverse=True):
            state, jobs = self._states[rank], asked[rank]
            if not state.in_service:
                continue
            wanted_rows = {job_id: tuple(wanted) for job_id, (_, wanted) in jobs.items()}
            answer = self._tiers.ask(state, UNREAD, state.tier.withdraw_stores, wanted_rows)
            if answer is None:
                continue
            try:
                given = _given(jobs, answer[0])
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                # Nothing is released: perhaps the tier still reads these rows.
                self._breach(state, "its withdraw_stores gave up rows that are not to be withdrawn", answer[0], error)
                continue
            self._jobs.give_up(state, given)

    def _breach(self, state: TierState, reason: str, answer: object, error: BaseException) -> None:
        self._jobs.count_misreport()
        self._tiers.retire(state, f"{reason}: {text_of(answer)} ({text_of(error)})")


def _job_id(entry: tuple[Job, Sequence[int]]) -> int:
    return entry[0].job_id


def _rows_of(jobs: Sequence[Job], answer: Sequence[Sequence[int]]) -> list[tuple[Job, Sequence[int]]]:
    """Return the rows of each job that has some.

    Args:
        jobs: the jobs that a tier was asked about.
        answer: the tier's answer, which may be anything.

    Raises:
        Exception: the answer is not what the contract asks for.
    """
    if len(answer) != len(jobs):
        raise BreachError(f"{len(answer)} answers for {len(jobs)} jobs")
    found: list[tuple[Job, Sequence[int]]] = []
    for job, rows in zip(jobs, answer, strict=True):
        if len(rows):
            allowed: list[int] = job.rows.tolist()
            allowed.reverse()
            # Nearly always, a cascade that waits has not begun at all.
            whole = type(rows) is list and rows == allowed
            found.append((job, allowed if whole else _checked(job.job_id, allowed, rows)))
    return found


def _given(
    jobs: dict[int, tuple[Job, list[int]]], answer: Sequence[tuple[int, Sequence[int]]]
) -> list[tuple[Job, Sequence[int]]]:
    """Return the rows that a tier gives up.

    Args:
        jobs: the jobs, each with the rows that the tier was asked to give up.
        answer: the tier's answer, which may be anything.

    Raises:
        Exception: the answer is not what the contract asks for.
    """
    if len(answer) > len(jobs):
        raise BreachError(f"{len(answer)} answers for {len(jobs)} jobs")
    given: dict[int, tuple[Job, Sequence[int]]] = {}
    for job_id, rows in answer:
        if job_id not in jobs or job_id in given:
            raise BreachError(f"job {job_id} is not a store of its own with these rows")
        if len(rows):
            job, wanted = jobs[job_id]
            given[job_id] = (job, _checked(job_id, wanted, rows))
    return list(given.values())


def _checked(job_id: int, allowed: list[int], rows: Sequence[int]) -> list[int]:
    """Return ``rows`` as a list, each one of ``allowed`` at most once.

    Raises:
        Exception: that is not the case.
    """
    if len(rows) > len(allowed):
        raise BreachError(f"{len(rows)} rows of job {job_id}, which has {len(allowed)}")
    checked = list(map(index, rows))
    if checked == allowed or checked == allowed[::-1]:
        return checked
    if len(set(checked)) < len(checked) or not set(checked).issubset(allowed):
        raise BreachError(f"rows of job {job_id} that are not its own, or not waiting, or named twice: {checked[:8]}")
    return checked

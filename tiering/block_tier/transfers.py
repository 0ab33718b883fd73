"""Jobs of one tier: from the manager, over the I/O side, to their results.

- Store: the index chooses places → the I/O side writes → the index has the keys → the job's result.
- Load: the index returns the places → the I/O side reads → verified bytes are in the rows → the job's result.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Sequence
from itertools import compress
from operator import itemgetter, not_

from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.block_tier.corrupt import CorruptBlocks
from tiering.block_tier.pace import LoadPace
from tiering.block_tier.parts import TierHooks, TierParts
from tiering.errors import CorruptBlockError, DeviceError, OverdueError, StoreError
from tiering.medium.block_store import Done, Place
from tiering.medium.layers.breaker import BreakerOpenError
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.contract import JobResult, TransferJob

logger = logging.getLogger("kv_tiering.tier")

_LOG_PERIOD = 30.0
_LAST_BYTE = itemgetter(-1)

STORE_SHARE = 0.5
"""Largest share of the primary rows that the stores of one tier may use."""

SHORTEST_WINDOW = 0.01
"""Shortest time over which the rate of the medium is measured, in seconds."""

FADING = 0.1
"""Share by which a lower rate replaces the one measured before; a higher rate replaces it at once."""


class BlockTransfers:
    """Submits the jobs of one tier to its I/O side, and processes their results."""

    def __init__(self, parts: TierParts, hooks: TierHooks) -> None:
        context, index = parts.context, parts.index
        num_rows = context.primary_view.shape[0] if context.primary_view.shape else 0
        self.overdue = OverdueLoads(int(num_rows * parts.options.primary_share))
        """Loads past their deadline."""
        self._failure_lines = RateLimit(_LOG_PERIOD, context.clock)
        self._name = context.name
        self._clock = context.clock
        self._load_deadline, self._store_deadline = parts.options.longest_load, parts.options.deadline
        self._pace = (
            LoadPace(parts.options.longest_load, lambda: parts.io.load_depth, context.clock) if index.shared else None
        )
        self._admission = parts.intake.admission
        self._group_bytes, largest = context.group_bytes, max(context.group_bytes)
        self._credit = StoreCredit(lambda: parts.io.busy_bytes // largest, num_rows, context.clock)
        self._index = index
        self._io = parts.io
        self._events = parts.events
        self._stats = parts.stats
        self._hooks = hooks
        self._corrupt = CorruptBlocks(parts)
        self._undecided: dict[int, tuple[TransferJob, Callable[[float], Sequence[bool] | None]]] = {}
        """Stores whose plan is undecided, in their order, each with the function that decides."""
        self._not_begun = (math.inf, "")
        """Deadline and request of the last load that was not taken up.

        Its further parts are no further failures.
        """
        self.stores_due = math.inf
        """Time at which stores hang if none has ended and no byte was written until then."""
        self._stores = self._written = 0
        self._fingerprint = b""
        self._running: dict[int, TransferJob] = {}
        self._stale: set[int] = set()
        """Running jobs that were submitted in an epoch that the tier has left."""
        self._finished: list[JobResult] = []
        self.places_wanted = 0
        """Number of places that the last credit would have used, if fewer were ready; else 0."""
        self.stored = False
        """True if a store has begun since the present epoch was entered."""

    def admit(self, keys: Sequence[OffloadKey], req_id: str, *, fill: bool) -> list[int] | None:
        """Return the positions of the keys to store; None: all."""
        positions = self._admission.admit(keys, req_id, fill=fill)
        if len(positions) == len(keys):
            return None
        self._stats.stores_declined += len(keys) - len(positions)
        self._index.declined(keys, positions)
        return positions

    def credit(self, wanted: int, seconds: float) -> int:
        """Return how many of the ``wanted`` blocks keep the medium busy for ``seconds`` and get places."""
        limit = max(0, min(wanted, self._credit.limit(seconds) - self._stats.cascades_active))
        ready = self._index.places_ready
        self.places_wanted = limit if limit > ready else 0
        return int(min(limit, ready))

    def store(self, job: TransferJob) -> None:
        """Submit a store, as far as the index has places."""
        keys, stats = job.keys, self._stats
        planned, places, already_held, evicted, decision = self._index.plan_store(keys, self._clock())
        if evicted:
            stats.evictions += len(evicted)
            self._events.removed(evicted, evicted=True)
        if len(planned) < len(keys):
            stats.stores_declined += len(keys) - len(planned) - len(already_held)
            if already_held:
                # Not announced: a probe of a chain looks at some of its blocks only, and the others may be missing.
                job.held = [keys[position] for position in already_held]
        if not planned:
            self._finish(job, job.held)
            return
        rows: list[int] = job.block_ids.tolist()
        if len(planned) < len(rows):
            keys = [keys[position] for position in planned]
            rows = [rows[position] for position in planned]
        job.move(keys, rows, places, self._sizes(keys))
        stats.cascades_active += len(keys)
        self.stored = True
        if decision is None:
            self._submit(job)
        else:
            self._undecided[job.job_id] = job, decision

    def _sizes(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the raw bytes of each block."""
        if len(self._group_bytes) == 1:
            return list(self._group_bytes) * len(keys)
        # The last byte of a key is its group: an engine has a few, never more than 256.
        return list(map(self._group_bytes.__getitem__, map(_LAST_BYTE, keys)))

    def _give_back(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> None:
        """Give back the places of blocks that are not written."""
        self._stats.cascades_active -= len(keys)
        self._index.end_store(keys, places, [False] * len(keys), self._clock())

    def begin_decided(self) -> bool:
        """Begin the stores whose plans are decided now, in order; return True if none is undecided."""
        while self._undecided:
            job, decision = next(iter(self._undecided.values()))
            chosen = decision(self._clock())
            if chosen is None:
                return False
            del self._undecided[job.job_id]
            if False in chosen:
                left = list(map(not_, chosen))
                self._give_back(list(compress(job.moved, left)), list(compress(job.places, left)))
                self._stats.stores_left += left.count(True)
                job.keep(chosen)
            if job.moved:
                self._submit(job)
            else:
                self._finish(job, job.held)
        return True

    def drop_undecided(self) -> None:
        """Drop the stores whose plans are undecided."""
        undecided, self._undecided = self._undecided, {}
        for job, _ in undecided.values():
            self._give_back(job.moved, job.places)
            self._stats.stores_dropped += len(job.moved)
            self._finish(job, ())

    def refuse(self, job: TransferJob) -> None:
        """End a job at once, because the tier is out of service, or takes no stores."""
        if job.is_promotion:
            self._stats.promotions_failed += len(job.keys)
        else:
            self._stats.stores_dropped += len(job.keys)
        self._finish(job, ())

    def load(self, job: TransferJob) -> None:
        """Submit a load of the keys that the index holds."""
        places = self._index.begin_load(job.keys)
        keys, rows = job.keys, job.block_ids.tolist()
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            there = [place is not None for place in places]
            keys, rows = list(compress(keys, there)), list(compress(rows, there))
            self._stats.promotions_failed += len(places) - len(known)
        sizes = self._sizes(keys)
        if self._pace is not None and (fitting := self._pace.fitting(sizes)) < len(keys):
            self._stats.loads_too_long += len(keys) - fitting
            keys, rows, known, sizes = keys[:fitting], rows[:fitting], known[:fitting], sizes[:fitting]
        if not known:
            self._finish(job, ())
            return
        if self._pace is not None:
            self._pace.begin(sizes)
        self._stats.promotions_active += len(keys)
        job.move(keys, rows, known, sizes)
        self.overdue.begin(job)
        self._submit(job)

    def _submit(self, job: TransferJob) -> None:
        if not job.is_promotion:
            self._stores += 1
            if self.stores_due == math.inf:
                self._await_stores(job.deadline)
        job.fingerprint = self._fingerprint
        self._running[job.job_id] = job
        self._io.submit(job)

    @property
    def running(self) -> int:
        """Number of jobs on the I/O side."""
        return len(self._running)

    @property
    def calm(self) -> bool:
        """True if nothing happens here before the I/O side ends a job or a task, or another job is submitted."""
        return not (self._finished or self._undecided or self.overdue.deadlines)

    def take_finished(self) -> list[JobResult]:
        """Return the results of the jobs that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def poll(self) -> None:
        """Process the jobs and tasks that the I/O side has ended, and begin stores whose plans are decided."""
        for job in self._io.poll():
            self._end(job)
        if self._undecided:
            self.begin_decided()

    def expire(self, now: float) -> None:
        """Count the loads that are overdue at ``now`` as failures of the medium."""
        reads = self._io.breakers.reads
        stalled = self._pace is not None and self._pace.stalled(self._io.stats.read_bytes)
        for rows in self.overdue.expire(now):
            self._stats.loads_overdue += rows
            overdue = f"a load of {rows} blocks did not end within {self._load_deadline:g} s"
            if stalled:
                # Each further request would wait as long; probes in the background find out when the medium answers.
                reads.trip(f"{overdue}, and no block arrived meanwhile")
            else:
                reads.record_failure(overdue)
            if self.overdue.spent:
                self._io.breakers.trip(f"{self.overdue.rows} primary rows are held by loads that do not end")

    def _await_stores(self, due: float) -> None:
        """Let stores count as hanging at ``due`` unless there is progress until then."""
        self.stores_due, self._written = due, self._io.stats.written_bytes

    def expire_stores(self, now: float) -> None:
        """Take the tier out of service if stores hang beyond their deadline and nothing was written.

        Background probes find out when the medium answers: first for reads, which it may still serve.
        """
        if self._io.stats.written_bytes != self._written or not self._io.hanging_stores:
            self._await_stores(now + self._store_deadline)
        else:
            self.stores_due = math.inf
            self._io.breakers.trip(
                f"{self._io.hanging_stores} store(s) did not end within {self._store_deadline:g} s, and no byte was "
                "written meanwhile"
            )

    def enter(self, namespace: Namespace) -> None:
        """Write and expect blocks of ``namespace`` from now on."""
        self._fingerprint = namespace.fingerprint

    def leave(self) -> None:
        """Leave the present epoch: from now on no result counts, not even those of running jobs."""
        self._stale.update(self._running)
        self._fingerprint = b""
        self.stored = False
        self.places_wanted = 0
        self.drop_undecided()
        self._finished = [result._replace(success=False, successful_keys=[]) for result in self._finished]

    def _finish(self, job: TransferJob, successful: Sequence[OffloadKey]) -> None:
        complete = len(successful) == len(job.keys)
        seconds = None if job.ended_at is None else job.ended_at - job.submitted_at
        self._finished.append(
            JobResult(job.job_id, complete, None if complete else list(successful), transfer_time=seconds)
        )

    def _end(self, job: TransferJob) -> None:
        if self._running.pop(job.job_id, None) is None:
            logger.error("tier %s: the I/O side reported job %d, which is not running", self._name, job.job_id)
            return
        self._hooks.on_result(job)
        outcomes = job.outcomes
        done = outcomes.count(Done.DONE)
        failed = done < len(outcomes) and done + outcomes.count(Done.ABSENT) < len(outcomes)
        if failed:
            ended = zip(job.places, outcomes, strict=True)
            if bad := [place for place, outcome in ended if isinstance(outcome, DeviceError)]:
                self._hooks.retire(bad)
        now = self._clock()
        self._stats.observe_job(now - job.submitted_at)
        # No block succeeds across a reset: the index must not hold it, and the manager must not serve it.
        current = job.job_id not in self._stale
        self._stale.discard(job.job_id)
        if current and done == len(outcomes):
            arrived = [True] * done
        else:
            arrived = [current and outcome is Done.DONE for outcome in outcomes]
        if not job.is_promotion and (revoked := self._hooks.revoked_places()):
            arrived = [good and place not in revoked for good, place in zip(arrived, job.places, strict=True)]
        keys = job.moved if False not in arrived else list(compress(job.moved, arrived))
        if job.is_promotion:
            self._end_load(job, arrived, keys, now)
        else:
            self._end_store(job, arrived, keys, now)
        if current and failed:
            self._note_failures(job)
        self._finish(job, [*job.held, *keys] if current and job.held else keys)

    def _note_failures(self, job: TransferJob) -> None:
        """Count the failed blocks of a job, and log the last reason.

        The I/O side itself logs corrupt blocks, and the breaker logs outages.
        """
        errors = [outcome for outcome in job.outcomes if isinstance(outcome, StoreError)]
        self._stats.corrupt_blocks += sum(isinstance(error, CorruptBlockError) for error in errors)
        self._stats.device_errors += sum(isinstance(error, DeviceError) for error in errors)
        others = [
            error for error in errors if not isinstance(error, (CorruptBlockError, OverdueError, BreakerOpenError))
        ]
        if others and (events := self._failure_lines.admit(len(others))):
            logger.warning(
                "tier %s: %d block(s) were %s, the last one (of job %d) because: %s",
                self._name,
                events,
                "not loaded" if job.is_promotion else "not stored",
                job.job_id,
                others[-1],
            )

    def _end_store(self, job: TransferJob, arrived: list[bool], stored: Sequence[OffloadKey], now: float) -> None:
        self._stores -= 1
        self._await_stores(now + self._store_deadline if self._stores else math.inf)
        self._credit.ended(len(job.moved))
        self._index.end_store(job.moved, job.places, arrived, now)
        self._stats.cascades += len(stored)
        self._stats.cascades_failed += len(job.moved) - len(stored)
        self._stats.cascades_active -= len(job.moved)
        self._events.stored(stored)

    def _end_load(self, job: TransferJob, arrived: list[bool], loaded: Sequence[OffloadKey], now: float) -> None:
        outcomes = job.outcomes
        if self._pace is not None:
            self._pace.end(job.sizes, job.moved_bytes)
        all_done = outcomes.count(Done.DONE) == len(outcomes)
        if not self.overdue.end(job.job_id) and not all_done:
            waited = sum(isinstance(outcome, OverdueError) for outcome in outcomes)
            self._stats.loads_overdue += waited
            load = (job.deadline, job.req_context.req_id)
            if waited == len(outcomes) and load != self._not_begun:
                self._not_begun = load
                self._io.breakers.reads.record_failure(
                    f"a load of {waited} blocks was not taken up within {self._load_deadline:g} s"
                )
        self._events.read(loaded)
        lost = [False] * len(outcomes)
        if not all_done:
            lost = [
                outcome is Done.ABSENT or isinstance(outcome, (CorruptBlockError, DeviceError)) for outcome in outcomes
            ]
        self._events.removed(self._index.end_load(job.moved, job.places, lost, now))
        if self._index.shared:
            self._corrupt.ended(job)
        self._stats.promotions += len(loaded)
        self._stats.promotions_failed += len(arrived) - len(loaded)
        self._stats.promotions_active -= len(arrived)


class OverdueLoads:
    """Loads whose I/O still runs after their deadline, and the primary rows that they hold.

    Args:
        limit_rows: number of primary rows that overdue loads may hold; at least 1.
    """

    def __init__(self, limit_rows: int) -> None:
        self.limit_rows = max(1, limit_rows)
        self.rows = 0
        """Number of rows that overdue loads hold."""
        self.deadlines: list[tuple[float, int]] = []
        """Heap of the deadlines that have not passed, with job numbers; the first one's job has not ended."""
        self._running: dict[int, TransferJob] = {}
        self._overdue: dict[int, int] = {}

    def begin(self, job: TransferJob) -> None:
        """Record that a load was submitted."""
        self._running[job.job_id] = job
        heapq.heappush(self.deadlines, (job.deadline, job.job_id))

    def end(self, job_id: int) -> bool:
        """Record that a load's I/O has ended, and return True if the load had been counted as overdue."""
        if self._running.pop(job_id, None) is not None:
            while self.deadlines and self.deadlines[0][1] not in self._running:
                heapq.heappop(self.deadlines)
            return False
        self.rows -= self._overdue.pop(job_id, 0)
        return True

    def expire(self, now: float) -> list[int]:
        """Count the loads that are overdue at ``now``, and return the rows of each newly counted load.

        Jobs of one request with the same deadline are parts of one load.
        """
        expired: dict[tuple[float, str], int] = {}
        while self.deadlines and self.deadlines[0][0] <= now:
            deadline, job_id = heapq.heappop(self.deadlines)
            job = self._running.pop(job_id, None)
            if job is not None:
                rows = self._overdue[job_id] = len(job.moved)
                load = deadline, job.req_context.req_id
                expired[load] = expired.get(load, 0) + rows
                self.rows += rows
        return list(expired.values())

    @property
    def spent(self) -> bool:
        """True if overdue loads hold their whole share of rows.

        Loads never use more rows than this share, so the count cannot exceed it.
        """
        return self.rows >= self.limit_rows


class StoreCredit:
    """Number of blocks that a medium ends in a given time, from those that it has ended lately.

    A medium that ends all its blocks within a step gets more of them in the next one: the number doubles until it is
    the medium that sets the pace.

    Args:
        least: returns the number of blocks that keep all places of the medium busy.
        num_rows: number of primary rows.
        clock: returns monotonic seconds.
    """

    __slots__ = ("_began", "_clock", "_ended", "_least", "_most", "_rate")

    def __init__(self, least: Callable[[], int], num_rows: int, clock: Callable[[], float]) -> None:
        self._least = least
        self._most = max(1, int(STORE_SHARE * num_rows))
        self._clock = clock
        self._began = clock()
        self._ended = 0
        self._rate = 0.0

    def ended(self, blocks: int) -> None:
        """Record that the stores of ``blocks`` blocks have ended."""
        self._ended += blocks

    def limit(self, seconds: float) -> int:
        """Return the number of blocks that may be with the medium, so that it is busy for ``seconds``."""
        now = self._clock()
        window = now - self._began
        if window >= SHORTEST_WINDOW:
            rate = self._ended / window
            self._rate = max(rate, self._rate + FADING * (rate - self._rate))
            self._began, self._ended = now, 0
        return min(self._most, max(1, self._least(), int(self._rate * seconds)))

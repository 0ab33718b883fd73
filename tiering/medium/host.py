"""I/O side of a tier: threads that run jobs in units, and their queues to the scheduler's thread.

The scheduler's thread only appends to deques and takes from them (:meth:`IoHost.submit`, :meth:`IoHost.run`,
:meth:`IoHost.poll`). The thread that first takes a job cuts it into units, and one thread moves each unit. All threads
share the units, the head of the prefix first. Inside a unit, blocks are ordered by slot, so that a store finds
neighbours side by side. Tasks run before loads, and loads before stores. The depth of each direction
(:mod:`tiering.runtime.depth`) bounds the units that run at once.

The threads are started when the tier is opened, and are parked until there is work. There are more of them than units
may run, so that others go on while some hang in the medium. If no thread can be started, jobs and tasks fail with a
:class:`TemporaryStoreError`. The component that submitted a task tries again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tiering.errors import OverdueError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.medium.block_store import BlockStore, Done, Outcome
from tiering.medium.lanes import Lanes, Unit, take_unit
from tiering.medium.layers.attempts import DeadlineLayer, IoStats, MeterLayer, RetryLayer
from tiering.medium.layers.breaker import BreakerLayer, BreakerOpenError, Breakers
from tiering.medium.pipeline import LOG_PERIOD, Pipeline, release_frames
from tiering.medium.side import IoTask
from tiering.runtime.pool import ThreadPool
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.contract import TierContext, TransferJob
from tiering.secondary.options import BlockTierOptions, CompressionOptions

_log = logging.getLogger("kv_tiering.io")

BATCH_UNIT_BYTES = 8 << 20
"""Maximum bytes of one unit for media that move several blocks at once."""

LEAST_UNIT_BYTES, LEAST_UNIT_BLOCKS = 2 << 20, 8
"""Units of media that move several blocks at once are not cut below the smaller one of these.

A unit costs about as much CPU time as 10 blocks. The bound on blocks is for small ones in scattered slots: each takes a
call of its own, and many in one unit would wait for one another. It is twice as high for stores while nothing is
loaded: loads wait for the units of stores, with which they share the places.
"""

SINGLE_UNIT_BYTES = 1 << 20
"""Maximum bytes of one unit for media that move one block after the other."""

LOOKUP_THREADS = 32
"""Maximum number of lookups that run at once."""

LOOKUP_GATHERING = 0.005
"""Longest time in seconds for which the result of a lookup waits for those of others.

An engine runs the requests together whose lookups end together. Each further run of its model costs more than this.
"""

TASK_THREADS = 4
"""Threads for tasks, besides those for the largest depth and for units that hang."""

_LONGEST_WAIT = 0.05
_LOG_PERIOD = 30.0


_TaskDone = tuple[IoTask, Any, BaseException | None]


class IoHost:
    """Runs the jobs and tasks of one tier.

    :meth:`poll` returns every submitted job exactly once, when nothing of it runs any more, whatever its outcome. The
    scheduler's thread calls all methods, which :class:`~tiering.medium.side.IoSide` describes.

    This is the only place where the layers around a block store are stacked: retry(breaker(deadline(meter(store)))). A
    pipeline uses them, in as many threads at once as ``options.max_inflight`` allows.

    Args:
        store: the medium, without layers.
        options: options of the tier.
        context: environment of the tier.
        element_size: bytes of one KV element, by which compression splits; default 2.
        sleep: function that waits for some seconds; default: a wait that ends early when the host is closed.

    Raises:
        ConfigError: the store or the installation does not support the compression.
    """

    def __init__(
        self,
        store: BlockStore,
        options: BlockTierOptions,
        context: TierContext,
        *,
        element_size: int = 2,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        name, clock, depth, batches = context.name, context.clock, options.depth, store.traits.batches
        self.name = name
        self.stopping = threading.Event()
        """Event that is set once the host is closed; long tasks check it."""
        self.stats = IoStats()
        self.breakers = Breakers.build(options.breaker, name=name, clock=clock)
        metered = MeterLayer(store, self.stats, clock=clock)
        self.store: BlockStore = RetryLayer(
            BreakerLayer(DeadlineLayer(metered, clock=clock), self.breakers),
            options.retries,
            self.stats,
            clock=clock,
            sleep=self.stopping.wait if sleep is None else sleep,
            stopping=self.stopping.is_set,
        )
        self._pipeline = Pipeline(
            self.store,
            context.primary_view,
            name=name,
            breakers=self.breakers,
            clock=clock,
            compress=isinstance(options, CompressionOptions) and options.compression == "zstd",
            element_size=element_size,
        )
        self._clock = clock
        self.unit_bytes = BATCH_UNIT_BYTES if batches else SINGLE_UNIT_BYTES
        """Maximum bytes of a unit; a single block may be larger."""
        self.least_unit_bytes = LEAST_UNIT_BYTES if batches else 0
        """Bytes below which no job is cut; 0 if a unit may be a single block."""
        self.lanes = Lanes(depth, clock)
        """Units that wait and run, and the depth of each direction."""
        self._threads = ThreadPool(f"kv-{name}-io", depth.most + depth.start + TASK_THREADS, clock)
        self._lookups = ThreadPool(f"kv-{name}-lookup", LOOKUP_THREADS, clock)
        self._woken = False
        """True while a thread has been woken for units and has not begun to look for them."""
        self._lookups_begun = 0
        """Number of lookups that the scheduler's thread has submitted."""
        self._lookups_ended = 0
        self._gathered: list[_TaskDone] = []
        """Lookups that have ended and wait for others, for :data:`LOOKUP_GATHERING` at most."""
        self._report_at = math.inf
        """Time at which a thread reports them."""
        self._ended: deque[TransferJob | _TaskDone] = deque()
        self._news = threading.Event()
        self._announce = context.news.announce
        self._lock = threading.Lock()
        self._submitted = 0
        self._finished = 0
        self._unexpected = RateLimit(LOG_PERIOD, clock)
        self._hanging = RateLimit(_LOG_PERIOD, clock)
        self._short_of_threads = False
        """True if a lack of threads that lasts has been logged."""

    # ------------------------------------------------------------------------------------------- the scheduler's thread

    @property
    def load_depth(self) -> int:
        return self.lanes.loads.finder.depth

    @property
    def store_depth(self) -> int:
        return self.lanes.stores.finder.depth

    @property
    def hanging_stores(self) -> int:
        return self.lanes.stores.stuck(self._clock())

    def start(self, deadline: float, *, lookups: bool) -> None:
        for pool in (self._threads, self._lookups) if lookups else (self._threads,):
            pool.start(deadline - self._clock())

    @property
    def busy_bytes(self) -> int:
        return 2 * self.store_depth * self.unit_bytes

    def submit(self, job: TransferJob) -> None:
        self._submitted += 1
        unit = Unit(job, 0, len(job.moved), whole=True)
        if not job.moved:
            self._fail(unit, None)
        elif (closed := self._closed_error()) is not None:
            self._fail(unit, closed)
        else:
            self.lanes.of(job).waiting.append(unit)
            if self.lanes.has_work:
                self._wake()

    def run(self, task: IoTask) -> None:
        self._lookups_begun += task.lookup
        if (closed := self._closed_error()) is not None:
            self._refuse(task, closed)
        else:
            pool = self._lookups if task.lookup else self._threads
            pool.run(partial(self._run_task, task), partial(self._refuse, task))

    def poll(self) -> list[TransferJob]:
        if self.lanes.loads.waiting or self.lanes.stores.waiting:
            self._sweep()
        if (shortage := self._threads.shortage) is not None:
            self._note_shortage(shortage)
        else:
            self._short_of_threads = False
        jobs: list[TransferJob] = []
        while self._ended:
            item = self._ended.popleft()
            if isinstance(item, TransferJob):
                jobs.append(item)
                continue
            task, result, error = item
            try:
                task.on_done(result, error)
            except Exception:
                _log.exception("tier %s: processing the result of task %s failed", self.name, task.name)
        return jobs

    def wait(self, timeout: float) -> bool:
        if not self._ended:
            self._news.clear()
            if not self._ended:
                self._news.wait(timeout)
        return bool(self._ended)

    def drain(self, deadline: float) -> bool:
        for wait in _waits(self._clock, deadline):
            self._sweep()
            if self._finished == self._submitted:
                return True
            self._news.clear()
            if self._finished != self._submitted:
                self._news.wait(wait)
        return self._finished == self._submitted

    def drop_waiting(self) -> None:
        self._fail_waiting(TemporaryStoreError("a reset came before it was begun"))

    def close(self, deadline: float) -> bool:
        self.stopping.set()
        self._threads.stop()
        self._lookups.stop()
        self._fail_unbegun()
        for wait in _waits(self._clock, deadline):
            if self._threads.join(wait) and self._lookups.join(wait):
                break
        else:
            return False
        self._fail_unbegun()
        self._pipeline.release()
        return True

    def join(self) -> None:
        self._threads.join()
        self._lookups.join()

    def _closed_error(self) -> StoreError | None:
        return PermanentStoreError(f"tier {self.name} is closed") if self.stopping.is_set() else None

    def _wake(self) -> None:
        """Make a thread look for units.

        A thread that finds further units wakes the next thread. A burst of jobs therefore wakes one thread only, and
        costs its caller one system call.
        """
        if not self._woken:
            self._woken = True
            self._threads.run(self._run_units, self._refuse_units)

    def _sweep(self) -> None:
        """Fail the jobs that wait in vain, and wake a thread in place of those that hang.

        Jobs wait in vain if a breaker keeps them from the medium, or if they are overdue because all threads hang.
        """
        now = self._clock()
        for queue, load in ((self.lanes.loads.waiting, True), (self.lanes.stores.waiting, False)):
            if queue and not self.breakers.allows(load=load):
                while (unit := take_unit(queue)) is not None:
                    self._fail(unit, BreakerOpenError(f"the tier takes no {unit.job.verb}s for the time being"))
            while (unit := self._take_overdue(queue, now)) is not None:
                self._fail(unit, OverdueError("the deadline passed while the job was waiting"))
        if not self.lanes.has_work:
            return
        if (stuck := self.lanes.stuck()) and (count := self._hanging.admit(stuck)):
            _log.warning("tier %s: %d I/O thread(s) hang in the medium; others go on", self.name, count)
        self._wake()

    def _note_shortage(self, error: BaseException) -> None:
        """Bound the depth by the threads that run, because no more could be started for ``error``."""
        self.lanes.refused(self._threads.alive)
        if not self._short_of_threads:
            self._short_of_threads = True
            _log.error(
                "tier %s: %d of %d I/O threads run (%s); raise the limit on processes (ulimit -u, "
                "docker: --pids-limit) or on memory (ulimit -v); it is tried again",
                self.name,
                self._threads.alive,
                self._threads.size,
                error,
            )

    def _take_overdue(self, queue: deque[Unit], now: float) -> Unit | None:
        try:
            if queue[0].job.deadline > now:
                return None
            unit = queue.popleft()
        except IndexError:
            return None
        if unit.job.deadline <= now:
            return unit
        # Another thread took the overdue unit in between: put this one back, and wake the thread that found the queue
        # empty meanwhile.
        queue.appendleft(unit)
        self._wake()
        return None

    def _fail_unbegun(self) -> None:
        self._fail_waiting(TemporaryStoreError(f"tier {self.name} is closing"))

    # -------------------------------------------------------------------------------------------------- the I/O threads

    def _run_units(self) -> None:
        """Run the most urgent units until there is none for which there is a place."""
        self._woken = False
        while not self.stopping.is_set() and (unit := self.lanes.begin()) is not None:
            if unit.whole:
                unit = self._cut(unit)
            if self.lanes.has_work:
                self._wake()
            self._run_unit(unit)

    def _cut(self, unit: Unit) -> Unit:
        """Cut a whole job, or a part of one, into units; return the first one and queue the others.

        The more jobs wait, the fewer units are needed to use all places. Larger units cost less CPU time per block.
        """
        job, lane = unit.job, self.lanes.of(unit.job)
        size = max(1, max(job.sizes, default=1))
        share = -((unit.start - unit.stop) // max(1, lane.finder.depth - len(lane.waiting)))
        loads = self.lanes.loads
        is_urgent = job.is_promotion or loads.waiting or loads.running
        least = min(self.least_unit_bytes // size, LEAST_UNIT_BLOCKS if is_urgent else 2 * LEAST_UNIT_BLOCKS)
        blocks = max(1, min(max(share, least), self.unit_bytes // size))
        starts = range(unit.start, unit.stop, blocks)
        units = [Unit(job, start, min(start + blocks, unit.stop)) for start in starts]
        with self._lock:
            job.unfinished += len(units) - 1
        lane.waiting.extendleft(units[:0:-1])
        return units[0]

    def _run_unit(self, unit: Unit) -> None:
        """Run a unit that :meth:`Lanes.begin` gave to this thread."""
        job = unit.job
        positions: Sequence[int] = range(unit.start, unit.stop)
        outcomes: Sequence[Outcome] = ()
        try:
            ordered = positions
            if isinstance(job.places[unit.start], int):
                ordered = sorted(positions, key=job.places.__getitem__)
            outcomes = self._pipeline.run(job, ordered)
        except BaseException as error:
            if not isinstance(error, StoreError) and self._unexpected.admit():
                _log.exception("tier %s: a %s of %d block(s) failed unexpectedly", self.name, job.verb, len(positions))
            release_frames(error)
            failure = (
                error if isinstance(error, StoreError) else PermanentStoreError(f"{type(error).__name__}: {error}")
            )
            ordered, outcomes = positions, [failure] * len(positions)
        moved = [job.sizes[at] for at, outcome in zip(ordered, outcomes, strict=True) if outcome is Done.DONE]
        self.lanes.end(job, sum(moved), failed=len(moved) < len(positions))
        self._end_unit(job, ordered, outcomes)

    def _run_task(self, task: IoTask) -> None:
        result: Any = None
        failure: BaseException | None = self._closed_error()
        if failure is None and self._clock() >= task.expires:
            failure = OverdueError("nothing waits for the lookup any more")
        if failure is None:
            try:
                result = task.run()
            except BaseException as error:
                release_frames(error)
                failure = error
        done = task, result, failure
        if task.lookup:
            self._end_lookup(done)
        else:
            self._end(done)

    def _end_lookup(self, done: _TaskDone) -> None:
        """Report a lookup with the others that run, within :data:`LOOKUP_GATHERING` and its deadline."""
        now = self._clock()
        until = min(now + LOOKUP_GATHERING, done[0].expires)
        with self._lock:
            self._gathered.append(done)
            self._lookups_ended += 1
            is_last = self._lookups_ended == self._lookups_begun
            if not is_last:
                if until >= self._report_at:
                    return
                self._report_at = until
        if not is_last:
            self.stopping.wait(max(0.0, until - now))
        with self._lock:
            gathered, self._gathered, self._report_at = self._gathered, [], math.inf
        if gathered:
            self._end(*gathered)

    # ------------------------------------------------------------------------------------------------------- any thread

    def _refuse_units(self, error: StoreError) -> None:
        """Fail all units that wait, because no thread runs.

        The flag comes first. A caller that finds it set has queued its units before, so that they are found here.
        """
        self._woken = False
        self._fail_waiting(error)

    def _fail_waiting(self, error: StoreError) -> None:
        while (unit := self.lanes.take_any()) is not None:
            self._fail(unit, error)

    def _refuse(self, task: IoTask, error: StoreError) -> None:
        with self._lock:
            self._lookups_ended += task.lookup
        self._end((task, None, error))

    def _fail(self, unit: Unit, error: StoreError | None) -> None:
        """End a unit that no thread runs; ``error`` is None for a unit without blocks."""
        positions = range(unit.start, unit.stop)
        outcomes = [error] * len(positions) if error is not None else []
        self._end_unit(unit.job, positions, outcomes)

    def _end_unit(self, job: TransferJob, positions: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Note the outcomes of a unit, and report its job if the unit was the last one."""
        with self._lock:
            for position, outcome in zip(positions, outcomes, strict=True):
                job.outcomes[position] = outcome
            job.unfinished -= 1
            if job.unfinished:
                return
            self._finished += 1
        job.ended_at = self._clock()
        self._end(job)

    def _end(self, *items: TransferJob | _TaskDone) -> None:
        self._ended.extend(items)
        self._news.set()
        self._announce()


def _waits(clock: Callable[[], float], deadline: float) -> Iterator[float]:
    """Yield lengths of waits until ``deadline`` on ``clock``; the last one is 0.

    The waits also end when the real time that the clock promised has passed.
    """
    begun = time.monotonic()
    allowed = deadline - clock()
    while (left := min(deadline - clock(), allowed - (time.monotonic() - begun))) > 0:
        yield min(left, _LONGEST_WAIT)
    yield 0.0

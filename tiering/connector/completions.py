"""The completion of the connector's copy jobs that the workers have reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.api.masking import shown_name
from tiering.api.request import LATE_STORE
from tiering.connector.counters import SchedulerCounters
from tiering.connector.events import OffloadingEventsTracker
from tiering.connector.groups import interleave
from tiering.connector.jobs import BlockFences, Job, JobTable, LoadTarget
from tiering.connector.loads import LoadPlanner
from tiering.connector.metadata import OffloadingWorkerMetadata, ReqId
from tiering.connector.protocols import ConnectorOutput
from tiering.connector.requests import FencedTables, RequestState
from tiering.connector.stores import StorePlanner
from tiering.runtime.ratelimit import LimitedWarning

logger = logging.getLogger("kv_tiering.connector")


class Completions:
    """Completion of jobs that have ended or failed.

    Args:
        manager: completes loads and stores.
        jobs: the connector's jobs.
        fences: fences of the GPU blocks.
        loads: the load planner.
        events: tracker of KV events.
        states: the requests by id.
        tables: the block tables of these requests.
        counters: counters of the scheduler half.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        jobs: JobTable,
        fences: BlockFences,
        loads: LoadPlanner,
        events: OffloadingEventsTracker,
        states: Mapping[ReqId, RequestState],
        tables: FencedTables,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._jobs = jobs
        self._fences = fences
        self._loads = loads
        self._events = events
        self._states = states
        self._tables = tables
        self._counters = counters
        self.orphans: set[int] = set()
        """Ids of the jobs that were in flight when the cache was reset, and have not ended."""
        self.stores: StorePlanner | None = None
        """The planner that notes loaded blocks; None if the CPU tier is inclusive."""
        self._workers_report_jobs = False
        self._warn_failed = LimitedWarning(logger, clock)
        self._warn_foreign = LimitedWarning(logger, clock)

    def process(self, output: ConnectorOutput) -> None:
        """Process the workers' reports of one step.

        Unfilled blocks are processed before any store becomes readable.

        Args:
            output: reports of one step, merged over the workers.
        """
        invalid = output.invalid_block_ids or ()
        if invalid:
            self._distrust(self._loads.take_foreign(invalid))
        report: OffloadingWorkerMetadata | None = output.kv_connector_worker_meta
        self._workers_report_jobs = self._workers_report_jobs or report is not None
        if report is None and self._workers_report_jobs:
            return  # no job has ended: the requests that are received now had no blocks to load
        if report is None:
            done = self._jobs.take_loads_of(output.finished_recving or ())
            unfilled = set(invalid)
            for job in done:
                job.failed = job.load is not None and not unfilled.isdisjoint(self._fences.blocks_of(job.job_id))
            self._note_failures([job for job in done if job.failed], invalid)
        else:
            if report.failed:
                self._note_failures(self._jobs.newly_failed(report), invalid)
            done = self._jobs.take_done(report)
        loads = [job for job in done if job.load is not None]
        for job in loads:
            self._release(job)
            self._loads.ended(job, 0.0 if report is None else report.load_seconds.get(job.job_id, 0.0))
            self._manager.complete_load(job.keys, job.ctx)
            if self.stores is not None and job.load is not None and not (job.failed or job.orphan):
                self._loaded(job.load, job.keys, self.stores)
        self.end_stores(done if not loads else [job for job in done if job.load is None])

    def _release(self, job: Job) -> None:
        self._fences.release(job.job_id)
        self.orphans.discard(job.job_id)

    def end_stores(self, jobs: Sequence[Job]) -> None:
        """Release the fences of stores that have ended on all workers, and complete these stores together."""
        if not jobs:
            return
        stores = []
        for job in jobs:
            self._release(job)
            if job.failed:
                self._events.store_failed(job.keys)
                if job.ctx is LATE_STORE:
                    self._counters.exclusive_losses += len(job.keys)
            stores.append((job.keys, job.ctx, not (job.failed or job.orphan)))
        self._manager.complete_stores(stores)
        for job in jobs:
            state = self._states.get(job.ctx.req_id)
            if state is None or state.ctx is not job.ctx:
                continue
            if job.distrusted:
                state.rewind()
            elif not (job.failed or job.orphan) and state.note_stored(len(job.keys)):
                self.refresh_stored(state)

    def _loaded(self, target: LoadTarget, keys: Sequence[OffloadKey], stores: StorePlanner) -> None:
        """Note blocks that a load has filled: now the engine's cache holds them too."""
        state = target.state
        if state.generation == target.generation and self._states.get(state.ctx.req_id) is state:
            stores.note_loaded(state)
            if state.policy.store:
                self._manager.engine_holds(keys)

    def fail_stores(self) -> None:
        """Let no store in flight become readable."""
        self._counters.stores_failed += len(self._jobs.distrust([job.job_id for job in self._jobs]))

    def abandon_all(self) -> None:
        """Let no job in flight have an effect when it ends, because the cache is reset."""
        for job in self._jobs:
            job.orphan = True
            self.orphans.add(job.job_id)

    def refresh_stored(self, state: RequestState) -> None:
        """Make all stored blocks of a request recent, in prefix order.

        A prompt is stored chunk by chunk, which leaves its tail more recent than its head. The tail is useless without
        the head. Nothing uses the blocks by this, so eviction policies that count uses do not count one.
        """
        state.stale_blocks = 0
        stored = [group.keys[: group.cursor] for group in state.groups]
        if any(stored):
            self._manager.touch(interleave(stored), state.ctx, False)

    def _distrust(self, unfilled: Collection[int]) -> None:
        """Fail the stores of blocks that loads of other connectors did not fill.

        Blocks that were computed on top of such blocks are not stored either.
        """
        if not unfilled:
            return
        wrong = self._tables.distrust(unfilled)
        if self._tables.engine_cache is not None:
            if wrong is None:
                self._tables.engine_cache.clear()
            else:
                self._tables.engine_cache.drop(wrong)
        jobs = [job.job_id for job in self._jobs] if wrong is None else self._fences.conflicts(list(wrong))
        dropped = self._jobs.distrust(jobs)
        self._counters.stores_failed += len(dropped)
        self._warn_foreign(
            "%d GPU blocks hold no KV, or that of another adapter; %d stores are dropped",
            len(unfilled),
            len(dropped),
        )

    def _note_failures(self, jobs: Sequence[Job], invalid: Collection[int]) -> None:
        """Record the jobs that failed.

        After a failed load, no block of the request is stored until the engine has gone back to the first token that
        was not filled.
        """
        for job in jobs:
            if job.load is None:
                self._counters.stores_failed += 1
            else:
                self._counters.loads_failed += 1
                target = job.load
                if target.state.generation == target.generation:
                    target.state.load_failed(target.invalid_from(invalid))
            self._warn_failed(
                "copy job %d failed: a %s of %d blocks of request %s",
                job.job_id,
                "store" if job.load is None else "load",
                len(job.keys),
                shown_name(job.ctx.req_id),
            )

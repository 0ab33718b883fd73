"""The connector's copy jobs that have not ended on all workers, and the fences on their GPU blocks.

Log lines of the scheduler and of the workers name such a job "copy job" with its number. Jobs of secondary tiers have
other names and numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.api.transfer import Rows
from tiering.connector.metadata import OffloadingWorkerMetadata
from tiering.connector.requests import RequestState

NO_JOBS: frozenset[int] = frozenset()
"""Result of :meth:`BlockFences.conflicts` if no block is in use."""


@dataclass(slots=True)
class LoadTarget:
    """Destination of a load."""

    state: RequestState
    """The request that the blocks are loaded for."""
    generation: int
    """Generation of the request when the load was queued."""
    first_token: int
    """First token that the load fills."""
    first_gpu_block: int | None
    """Position of the first loaded block in the request's block table; None for several KV-cache groups."""
    gpu_block_size: int
    """Tokens in a GPU block of the first group."""
    block_ids: list[int]
    """GPU blocks that the load fills; empty for several KV-cache groups."""

    def invalid_from(self, invalid_block_ids: Iterable[int]) -> int:
        """Return the first token that the load did not fill.

        Args:
            invalid_block_ids: GPU blocks that were not filled; if none of them belongs to the load, all its blocks
                count as not filled.
        """
        if self.first_gpu_block is None:
            return self.first_token
        invalid = set(invalid_block_ids)
        position = next((index for index, block_id in enumerate(self.block_ids) if block_id in invalid), 0)
        return max(self.first_token, (self.first_gpu_block + position) * self.gpu_block_size)


@dataclass(slots=True)
class WorkerJob:
    """One copy that was ordered from the workers."""

    job_id: int
    """Id of the job."""
    remaining: int
    """Number of workers that have not reported the job."""
    failed: bool = field(default=False, kw_only=True)
    """True if the job has failed."""


@dataclass(slots=True)
class Job(WorkerJob):
    """One copy of the tiering mode."""

    ctx: ReqContext
    """The request that the copy belongs to."""
    keys: list[OffloadKey]
    """Keys of the copied blocks."""
    load: LoadTarget | None = None
    """Destination of a load; None for a store."""
    orphan: bool = False
    """True if the cache was reset after the job was opened."""
    distrusted: bool = False
    """True for a store whose blocks may not match their keys.

    Such a store has failed, whatever the workers report.
    """


Ordered = TypeVar("Ordered", bound=WorkerJob)


class WorkerJobs(Generic[Ordered]):
    """Jobs by id; ids grow monotonically.

    A job is done when all workers have reported the job.

    Args:
        world_size: number of workers.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        """Number of workers."""
        self._jobs: dict[int, Ordered] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Ordered]:
        return iter(self._jobs.values())

    def new_id(self) -> int:
        """Return an id that no job has."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, job: Ordered) -> None:
        """Add a job with a new id."""
        self._jobs[job.job_id] = job

    def newly_failed(self, report: OffloadingWorkerMetadata) -> list[Ordered]:
        """Mark the jobs that failed on any worker; return those that had not failed before."""
        jobs = [job for job in map(self._jobs.get, report.failed) if job is not None and not job.failed]
        for job in jobs:
            job.failed = True
        return jobs

    def take_done(self, report: OffloadingWorkerMetadata) -> list[Ordered]:
        """Count the workers' reports; remove and return the jobs that all workers have reported.

        Unknown ids are ignored.
        """
        done = []
        for job_id, workers in report.finished.items():
            job = self._jobs.get(job_id)
            if job is not None:
                job.remaining -= workers
                if job.remaining <= 0:
                    del self._jobs[job_id]
                    done.append(job)
        return done


class JobTable(WorkerJobs[Job]):
    """Jobs of the tiering mode."""

    def open(self, ctx: ReqContext, keys: list[OffloadKey], load: LoadTarget | None = None) -> Job:
        """Add a job with a new id, and return the job.

        Args:
            ctx: the request that the copy belongs to.
            keys: keys of the copied blocks.
            load: destination of a load; default: None, a store.
        """
        job = self._jobs[self._next_id] = Job(self._next_id, self.world_size, ctx, keys, load)
        self._next_id += 1
        return job

    def withdraw(self, job_id: int) -> Job | None:
        """Remove a job that no worker has received and mark it failed; return None for an unknown id."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            job.failed = True
        return job

    def has_failed(self, job_id: int) -> bool:
        """Return True if the job is known to have failed."""
        job = self._jobs.get(job_id)
        return job is not None and job.failed

    def distrust(self, job_ids: Iterable[int]) -> list[Job]:
        """Mark the stores among ``job_ids`` distrusted and failed; return those newly marked."""
        jobs = [
            job for job in map(self._jobs.get, job_ids) if job is not None and job.load is None and not job.distrusted
        ]
        for job in jobs:
            job.failed = job.distrusted = True
        return jobs

    def take_loads_of(self, req_ids: Iterable[str]) -> list[Job]:
        """Remove and return the loads of these requests.

        Used for engines that do not carry the workers' own metadata.
        """
        wanted = set(req_ids)
        done = [job for job in self._jobs.values() if job.load is not None and job.ctx.req_id in wanted]
        for job in done:
            del self._jobs[job.job_id]
        return done


class BlockFences:
    """Fences on the GPU blocks that jobs use: one counter per block id, and one array per job.

    The engine may reallocate a GPU block while a queued or running copy uses the block. This happens when a request
    finishes, aborts or is preempted, when a sliding window moves on, and on a reset. KV stays correct because the copy
    ends before the step that reuses the block. The scheduler half passes all blocks that a step newly allocates to
    :meth:`conflicts`. The worker half waits for the jobs that this method returns.

    Several jobs may fence the same block. ``fence``, ``release`` and ``conflicts`` cost a few numpy operations each,
    for any number of blocks. A conflict costs one more operation per fenced job.
    """

    __slots__ = ("_jobs", "_users", "_writers", "_writing")

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[Rows, bool]] = {}
        self._users: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._writers: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._writing = 0
        """Number of fenced jobs that write blocks."""

    def __len__(self) -> int:
        return len(self._jobs)

    def fence(self, job_id: int, block_ids: Rows, *, writes: bool) -> None:
        """Fence the blocks that a job uses, until :meth:`release`.

        Args:
            job_id: id of the job; a job is fenced once.
            block_ids: GPU blocks that the job uses.
            writes: True if the job writes the blocks (a load), False if the job reads them (a store).
        """
        if len(block_ids):
            self._grow(int(block_ids.max()) + 1)
            self._users[block_ids] += 1
            if writes:
                self._writers[block_ids] += 1
                self._writing += 1
        self._jobs[job_id] = (block_ids, writes)

    def release(self, job_id: int) -> None:
        """Remove the fences of a job whose copy has ended on all workers; ignore unknown jobs."""
        block_ids, writes = self._jobs.pop(job_id, (None, False))
        if block_ids is not None and len(block_ids):
            self._users[block_ids] -= 1
            if writes:
                self._writers[block_ids] -= 1
                self._writing -= 1

    def conflicts(self, block_ids: Sequence[int] | Rows) -> frozenset[int]:
        """Return all jobs that use any of ``block_ids``."""
        if not self._jobs or not len(block_ids):
            return NO_JOBS
        asked = self._known(block_ids)
        clashing = asked[self._users[asked] > 0]
        if not len(clashing):
            return NO_JOBS
        marked = np.zeros(len(self._users), np.bool_)
        marked[clashing] = True
        return frozenset(job_id for job_id, (blocks, _) in self._jobs.items() if marked[blocks].any())

    def is_written(self, block_ids: Sequence[int] | Rows) -> bool:
        """Return True if a load that has not ended writes any of ``block_ids``."""
        return self._writing > 0 and bool(len(block_ids)) and bool(self._writers[self._known(block_ids)].any())

    def written(self, block_ids: Collection[int]) -> set[int]:
        """Return those of ``block_ids`` that are written by loads which have not ended."""
        known = np.fromiter((block for block in block_ids if block < len(self._writers)), np.int64)
        return set(known[self._writers[known] > 0].tolist())

    def blocks_of(self, job_id: int) -> list[int]:
        """Return the blocks that ``job_id`` uses; empty if the job is not fenced."""
        fenced = self._jobs.get(job_id)
        return [] if fenced is None else fenced[0].tolist()

    def _known(self, block_ids: Sequence[int] | Rows) -> Rows:
        asked = np.asarray(block_ids, dtype=np.int64)
        return asked[asked < len(self._users)]

    def _grow(self, size: int) -> None:
        if size > len(self._users):
            extra = np.zeros(max(size, 2 * len(self._users)) - len(self._users), np.int32)
            self._users = np.concatenate((self._users, extra))
            self._writers = np.concatenate((self._writers, extra))

"""The connector's jobs: copies that were handed to the workers and have not ended on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.connector.metadata import OffloadingWorkerMetadata
from tiering.connector.request_state import RequestState


@dataclass(slots=True)
class LoadTarget:
    """Where a load goes: the tokens it starts at, and for a single KV-cache group the logical index of its first GPU block."""

    state: RequestState
    generation: int
    first_token: int
    first_gpu_block: int | None
    gpu_block_size: int
    block_ids: list[int]

    def invalid_from(self, invalid_block_ids: Iterable[int]) -> int:
        """The first token that is not filled, given the blocks that are not (none known: all of them)."""
        if self.first_gpu_block is None:
            return self.first_token
        invalid = set(invalid_block_ids)
        position = next((index for index, block_id in enumerate(self.block_ids) if block_id in invalid), 0)
        return max(self.first_token, (self.first_gpu_block + position) * self.gpu_block_size)


@dataclass(slots=True)
class Job:
    """One copy.

    ``load`` is None for a store.  ``remaining``: workers that have not reported it.  ``orphan``: a reset came between.
    ``distrusted``: a store whose blocks may not be what its keys say; it has failed, whatever the workers report.
    """

    job_id: int
    ctx: ReqContext
    keys: list[OffloadKey]
    remaining: int
    load: LoadTarget | None = None
    failed: bool = False
    orphan: bool = False
    distrusted: bool = False


class JobTable:
    """Jobs by id.  Ids grow monotonically.  A job is done when ``world_size`` workers have reported it."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._jobs: dict[int, Job] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def open(self, ctx: ReqContext, keys: list[OffloadKey], load: LoadTarget | None = None) -> Job:
        """A new job with an id of its own."""
        job = Job(self._next_id, ctx, keys, self._world_size, load)
        self._next_id += 1
        self._jobs[job.job_id] = job
        return job

    def withdraw(self, job_id: int) -> Job | None:
        """A job that no worker was told of leaves the table, failed; None if it is not there."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            job.failed = True
        return job

    def has_failed(self, job_id: int) -> bool:
        """True if a job is known to have failed already."""
        job = self._jobs.get(job_id)
        return job is not None and job.failed

    def distrust(self, job_ids: Iterable[int]) -> list[Job]:
        """Mark the stores among ``job_ids`` as distrusted and failed; those of them that were not."""
        jobs = [
            job for job in map(self._jobs.get, job_ids) if job is not None and job.load is None and not job.distrusted
        ]
        for job in jobs:
            job.failed = job.distrusted = True
        return jobs

    def newly_failed(self, report: OffloadingWorkerMetadata) -> list[Job]:
        """Mark the jobs that failed on any worker; those of them that had not failed before."""
        jobs = [job for job in map(self._jobs.get, report.failed) if job is not None and not job.failed]
        for job in jobs:
            job.failed = True
        return jobs

    def take_done(self, report: OffloadingWorkerMetadata) -> list[Job]:
        """Count the workers' reports; the jobs that are done on all of them leave the table.  Unknown ids are ignored."""
        done = []
        for job_id, workers in report.finished.items():
            job = self._jobs.get(job_id)
            if job is not None:
                job.remaining -= workers
                if job.remaining <= 0:
                    del self._jobs[job_id]
                    done.append(job)
        return done

    def take_loads_of(self, req_ids: Iterable[str]) -> list[Job]:
        """The loads of these requests leave the table (for engines that do not carry the workers' own metadata)."""
        wanted = set(req_ids)
        done = [job for job in self._jobs.values() if job.load is not None and job.ctx.req_id in wanted]
        for job in done:
            del self._jobs[job.job_id]
        return done

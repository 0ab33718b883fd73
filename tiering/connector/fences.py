"""Fences on the GPU blocks that copies which have not ended read or write.

The engine may reallocate a GPU block while a queued or running copy uses the block. This happens when a request
finishes, aborts or is preempted, when a sliding window moves on, and on a reset. KV stays correct because the copy ends
before the step that reuses the block. The scheduler half passes all blocks that a step newly allocates to
:meth:`BlockFences.conflicts`. The worker half waits for the jobs that this method returns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.api.transfer import Rows

NO_JOBS: frozenset[int] = frozenset()
"""Result of :meth:`BlockFences.conflicts` if no block is in use."""


class BlockFences:
    """Fences by block id, kept as one counter per block id and one array per job.

    Several jobs may fence the same block. ``fence``, ``release`` and ``conflicts`` cost a few numpy operations each,
    for any number of blocks. A conflict costs one more operation per fenced job.
    """

    __slots__ = ("_jobs", "_users", "_writers")

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[Rows, bool]] = {}
        self._users: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._writers: NDArray[np.int32] = np.zeros(1024, np.int32)

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
        self._jobs[job_id] = (block_ids, writes)

    def release(self, job_id: int) -> None:
        """Remove the fences of a job whose copy has ended on all workers; ignore unknown jobs."""
        block_ids, writes = self._jobs.pop(job_id, (None, False))
        if block_ids is not None and len(block_ids):
            self._users[block_ids] -= 1
            if writes:
                self._writers[block_ids] -= 1

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
        return bool(self._jobs) and bool(len(block_ids)) and bool(self._writers[self._known(block_ids)].any())

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

"""Block fences: which GPU blocks are read or written by copies that have not ended.

The rule that keeps KV right: a GPU block that a queued or running copy uses may be reallocated at any time (finish,
abort, preemption, a window that slides on, reset), but that copy ends before the step that reuses the block.  The
scheduler asks :meth:`BlockFences.conflicts` about every block that a step newly allocates; the worker waits for the
jobs it names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.api.transfer import Rows

NO_JOBS: frozenset[int] = frozenset()


class BlockFences:
    """Fences by block id.  One counter per block id and one array per job: no object per fenced block.

    Several jobs may fence the same block.  ``fence``, ``release`` and ``conflicts`` cost a few numpy operations each,
    whatever the number of blocks, unless there is a conflict (then also one operation per fenced job).
    """

    __slots__ = ("_jobs", "_users", "_writers")

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[Rows, bool]] = {}
        self._users: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._writers: NDArray[np.int32] = np.zeros(1024, np.int32)

    def __len__(self) -> int:
        return len(self._jobs)

    def fence(self, job_id: int, block_ids: Rows, *, writes: bool) -> None:
        """From now on ``job_id`` reads (or, for a load, writes) these blocks.  A job is fenced once."""
        if len(block_ids):
            self._grow(int(block_ids.max()) + 1)
            self._users[block_ids] += 1
            if writes:
                self._writers[block_ids] += 1
        self._jobs[job_id] = (block_ids, writes)

    def release(self, job_id: int) -> None:
        """The copy has ended on all workers.  Unknown jobs are ignored."""
        block_ids, writes = self._jobs.pop(job_id, (None, False))
        if block_ids is not None and len(block_ids):
            self._users[block_ids] -= 1
            if writes:
                self._writers[block_ids] -= 1

    def conflicts(self, block_ids: Sequence[int] | Rows) -> frozenset[int]:
        """The jobs that use any of ``block_ids``; all of them, if several use the same block."""
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
        """Whether a load that has not ended writes any of ``block_ids``: their contents mean nothing yet."""
        return bool(self._jobs) and bool(len(block_ids)) and bool(self._writers[self._known(block_ids)].any())

    def written(self, block_ids: Collection[int]) -> set[int]:
        """Those of ``block_ids`` that loads which have not ended write."""
        known = np.fromiter((block for block in block_ids if block < len(self._writers)), np.int64)
        return set(known[self._writers[known] > 0].tolist())

    def blocks_of(self, job_id: int) -> list[int]:
        """The blocks that ``job_id`` uses; none if it is not fenced."""
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

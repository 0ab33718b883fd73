"""Messages between a tier on the scheduler's thread and its I/O side.

The messages are batched and contain plain values: ids, keys, rows, places. They are tuples, which the scheduler's
thread makes four times as fast as frozen dataclasses.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiering.api.keys import OffloadKey
from tiering.medium.block_store import Done, Outcome, Place


class IoKind(enum.Enum):
    """Direction of a job: a load reads the medium, a store writes to it."""

    LOAD = "load"
    """From the medium to primary rows."""
    STORE = "store"
    """From primary rows to the medium."""


class IoJob(NamedTuple):
    """Transfer of blocks between primary rows and places; all sequences are co-indexed."""

    job_id: int
    """Number of the job."""
    kind: IoKind
    """Direction of the transfer."""
    keys: Sequence[OffloadKey]
    """Keys of the blocks."""
    rows: Sequence[int]
    """Primary row of each block."""
    places: Sequence[Place]
    """Place of each block on the medium."""
    sizes: Sequence[int]
    """Raw bytes of each block, without padding."""
    fingerprint: bytes
    """Fingerprint of the namespace in which blocks are written, and which blocks must carry when read."""
    submitted_at: float
    """Time of submission in monotonic seconds."""
    deadline: float = float("inf")
    """Time in monotonic seconds after which no attempt starts; default: none."""


class IoResult(NamedTuple):
    """Result of a job that has ended: nothing of the job runs any more."""

    job: IoJob
    """The job that has ended."""
    outcomes: Sequence[Outcome]
    """Outcome of each block, co-indexed with the job's keys."""
    transfer_bytes: int
    """Raw bytes of the blocks that were moved."""
    transfer_time: float
    """Seconds from the first attempt to the end of the job."""

    @property
    def all_done(self) -> bool:
        """True if all blocks were moved."""
        return all(outcome is Done.DONE for outcome in self.outcomes)


class IoTask(NamedTuple):
    """Work on the I/O side other than jobs: probes, epochs, recovery."""

    name: str
    """Name of the task, for threads and logs."""
    run: Callable[[], Any]
    """Function that an I/O thread calls."""
    on_done: Callable[[Any, BaseException | None], None]
    """Function that receives the result of ``run``, or the exception that ``run`` raised.

    ``IoHost.poll`` calls it on the scheduler's thread.
    """
    lookup: bool = False
    """True: the task runs on the threads for lookups, so that lookups and jobs never wait for one another.

    Default False.
    """
    expires: float = float("inf")
    """Time in monotonic seconds after which a lookup that has not begun fails; default: none."""

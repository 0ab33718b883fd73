"""The messages between a tier's index (scheduler's side) and its I/O side: ids, keys, rows, places; plain and batched."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiering.api.keys import OffloadKey
from tiering.block_store import Done, Outcome, Place


class IoKind(enum.Enum):
    """Which way a job moves."""

    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class IoJob:
    """Move blocks between primary rows and places; all sequences are co-indexed.

    ``sizes``: raw bytes of each block (without padding).  ``deadline``: monotonic seconds, no attempt starts after it.
    ``fingerprint``: of the namespace the blocks are written in and must carry when read.
    """

    job_id: int
    kind: IoKind
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    places: Sequence[Place]
    sizes: Sequence[int]
    fingerprint: bytes
    submitted_at: float
    deadline: float = float("inf")


@dataclass(frozen=True, slots=True)
class IoResult:
    """A job has ended: nothing of it is running.  ``outcomes`` are co-indexed with the job's keys."""

    job: IoJob
    outcomes: Sequence[Outcome]
    transfer_bytes: int
    transfer_time: float

    @property
    def all_done(self) -> bool:
        """Whether every block arrived."""
        return all(outcome is Done.DONE for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class IoTask:
    """Anything else for the I/O side: probes, epochs, recovery.  ``run`` is called on an I/O thread.

    ``on_done`` is called on the scheduler's thread, from ``IoHost.poll``, with the result, or with the exception that
    ``run`` raised. ``background`` tasks run on a thread of their own and never delay a job.
    """

    name: str
    run: Callable[[], Any]
    on_done: Callable[[Any, BaseException | None], None]
    background: bool = False

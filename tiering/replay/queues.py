"""Speed of a simulated medium, and the queue of its stores: when they begin and end.

Each direction moves one job after the other. :mod:`tiering.replay.model` describes the duration of a job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiering.errors import OverdueError
from tiering.medium.block_store import Done, Outcome
from tiering.secondary.contract import TransferJob


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a medium in one direction."""

    bytes_per_second: float
    """Bytes per second of all transfers together."""
    latency: float
    """Time until the first byte of a block arrives, in seconds."""
    at_once: int
    """Number of blocks that are moved at the same time."""

    def seconds(self, blocks: int, moved: int) -> float:
        """Return the duration of a job, in seconds.

        Args:
            blocks: number of its blocks.
            moved: bytes that the medium moves for them.
        """
        if blocks <= self.at_once:
            return self.latency + moved / self.bytes_per_second
        waves = math.ceil(blocks / self.at_once)
        return max(self.latency + moved / self.bytes_per_second, waves * self.latency)


@dataclass(slots=True, eq=False)
class _Store:
    """One store that has not ended."""

    job: TransferJob
    blocks: int
    """Number of blocks."""
    raw_bytes: int
    """Raw bytes of these blocks."""
    begun: float = 0.0
    """Time at which its first block began."""
    end: float = math.inf
    """Time at which its last block will have been written; infinity before its first block begins."""


class StoreQueue:
    """The stores of one medium.

    Args:
        speed: speed of the medium.
        bytes_ratio: stored bytes by raw bytes, below 1 for a tier that compresses.
    """

    def __init__(self, speed: Speed, bytes_ratio: float) -> None:
        self._speed = speed
        self._ratio = bytes_ratio
        self._running: _Store | None = None
        self._waiting: dict[int, _Store] = {}
        self._ended: list[TransferJob] = []
        self._last_end = 0.0
        self.blocks = 0
        """Number of blocks written."""
        self.written_bytes = 0
        """Bytes written."""
        self.written_seconds = 0.0
        """Seconds during which the medium wrote."""

    def submit(self, job: TransferJob, now: float) -> None:
        """Add a store, which begins at once if the medium writes nothing."""
        store = _Store(job, len(job.moved), sum(job.sizes))
        if self._running is None:
            self._begin(store, now)
        else:
            self._waiting[job.job_id] = store

    def take_ended(self, now: float) -> list[TransferJob]:
        """Return the stores that have ended until ``now`` and were not returned yet."""
        ended, self._ended = self._ended, []
        waiting = self._waiting
        while (running := self._running) is not None:
            head = next(iter(waiting.values()), None)
            if head is not None and head.job.deadline <= min(running.end, now):
                del waiting[head.job.job_id]
                ended.append(_ended(head, OverdueError("the store waited longer than the tier's deadline")))
                continue
            if running.end > now:
                break
            ended.append(self._end(running))
            if head is not None:
                del waiting[head.job.job_id]
                self._begin(head, running.end)
        return ended

    def run_out(self) -> float:
        """Let all stores end, for :meth:`take_ended`, and return the time at which the last one has ended."""
        self._ended = self.take_ended(math.inf)
        return self._last_end

    @property
    def next_end(self) -> float:
        """Time at which the next store ends or misses its deadline; infinity if there is none."""
        if self._ended:
            return -math.inf
        if self._running is None:
            return math.inf
        head = next(iter(self._waiting.values()), None)
        return self._running.end if head is None else min(self._running.end, head.job.deadline)

    def _seconds(self, store: _Store) -> float:
        return self._speed.seconds(store.blocks, int(store.raw_bytes * self._ratio))

    def _begin(self, store: _Store, now: float) -> None:
        store.begun, store.end = now, now + self._seconds(store)
        self._running = store

    def _end(self, running: _Store) -> TransferJob:
        self._running = None
        self._last_end = running.end
        self.blocks += running.blocks
        self.written_bytes += int(running.raw_bytes * self._ratio)
        self.written_seconds += running.end - running.begun
        return _ended(running, Done.DONE)


def _ended(store: _Store, outcome: Outcome) -> TransferJob:
    """Return the job of a store whose blocks have ended with ``outcome``."""
    store.job.outcomes = [outcome] * store.blocks
    return store.job

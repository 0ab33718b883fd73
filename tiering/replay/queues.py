"""The jobs of one direction of a simulated medium, which are moved one after the other.

The end of a job is certain when it is submitted. :mod:`tiering.replay.model` describes the duration of a job.
"""

from __future__ import annotations

import heapq
import math
from itertools import count

from tiering.errors import OverdueError
from tiering.medium.block_store import Done, Outcome
from tiering.secondary.contract import TransferJob


class JobQueue:
    """The jobs of one direction of one medium.

    Args:
        bytes_per_second: bytes per second of all transfers together.
        latency: time until the first byte of a block arrives, in seconds.
        at_once: number of blocks that are moved at the same time.
        bytes_ratio: stored bytes by raw bytes, below 1 for a tier that compresses.
    """

    def __init__(self, bytes_per_second: float, latency: float, at_once: int, bytes_ratio: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._latency = latency
        self._at_once = at_once
        self._ratio = bytes_ratio
        self._order = count()
        self._jobs: list[tuple[float, int, TransferJob, Outcome]] = []
        self.free_at = 0.0
        """Time at which all submitted jobs will have been moved, in seconds."""
        self.blocks = 0
        self.moved_bytes = 0
        self.moved_seconds = 0.0

    def submit(self, job: TransferJob, now: float) -> None:
        """Add a job, which begins when those before it have been moved, or fails at its deadline."""
        start = max(now, self.free_at)
        if start >= job.deadline:
            overdue = OverdueError(f"the {job.verb} waited longer than the tier's deadline")
            self._push(max(job.deadline, now), job, overdue)
            return
        blocks, moved = len(job.moved), int(sum(job.sizes) * self._ratio)
        seconds = self.seconds(blocks, moved)
        self.free_at = start + seconds
        self.blocks += blocks
        self.moved_bytes += moved
        self.moved_seconds += seconds
        self._push(self.free_at, job, Done.DONE)

    def _push(self, end: float, job: TransferJob, outcome: Outcome) -> None:
        heapq.heappush(self._jobs, (end, next(self._order), job, outcome))

    @property
    def next_end(self) -> float:
        """Time at which the next job ends; infinity if there is none."""
        return self._jobs[0][0] if self._jobs else math.inf

    @property
    def last_end(self) -> float:
        """Time at which all jobs will have ended, those included that miss their deadline."""
        return max([self.free_at, *(end for end, *_ in self._jobs)])

    def take_ended(self, now: float) -> list[TransferJob]:
        """Return the jobs that have ended until ``now``, each once, with the outcomes of their blocks."""
        ended: list[TransferJob] = []
        while self.next_end <= now:
            _, _, job, outcome = heapq.heappop(self._jobs)
            job.outcomes = [outcome] * len(job.moved)
            ended.append(job)
        return ended

    def seconds(self, blocks: int, moved: int) -> float:
        """Return the duration of a job, in seconds.

        Args:
            blocks: number of its blocks.
            moved: bytes that the medium moves for them.
        """
        waves = math.ceil(blocks / self._at_once)
        return max(self._latency + moved / self._bytes_per_second, waves * self._latency)

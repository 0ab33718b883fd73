"""Interface of a tier's I/O side.

:class:`tiering.medium.host.IoHost` implements it, and so do fakes in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiering.medium.block_store import BlockStore
from tiering.medium.io_stats import IoStats
from tiering.medium.layers.breaker import Breakers
from tiering.medium.messages import IoTask
from tiering.secondary.contract import TransferJob


class IoSide(Protocol):
    """Runs jobs and tasks on other threads.

    The scheduler's thread calls all methods. Only :meth:`wait`, :meth:`drain` and :meth:`close` block.
    """

    @property
    def breakers(self) -> Breakers:
        """Circuit breakers of the tier, for reads and for writes."""

    @property
    def store(self) -> BlockStore:
        """The store with its layers, for tasks."""

    @property
    def stats(self) -> IoStats:
        """Counters of the I/O."""

    @property
    def load_depth(self) -> int:
        """Number of units of loads that may run at once now."""

    @property
    def store_depth(self) -> int:
        """Number of units of stores that may run at once now."""

    def start(self, deadline: float, *, lookups: bool) -> None:
        """Start the threads, and wait for them until ``deadline`` at most.

        Args:
            deadline: time on the tier's clock.
            lookups: True if lookups need threads, too.
        """

    @property
    def busy_bytes(self) -> int:
        """Bytes of stores that keep all places busy, with as many units waiting as running."""

    def submit(self, job: TransferJob) -> None:
        """Submit a job whose blocks have places; :meth:`poll` returns it."""

    def run(self, task: IoTask) -> None:
        """Submit a task; :meth:`poll` calls its ``on_done``."""

    @property
    def hanging_stores(self) -> int:
        """Number of threads that run a part of a store after its deadline."""

    def poll(self) -> Sequence[TransferJob]:
        """Return the jobs, with outcomes, that have ended since the last call: nothing of them runs."""

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for :meth:`poll` to have something, and return True if it has."""

    def drop_waiting(self) -> None:
        """Drop every job, or part of a job, that no thread has begun: its blocks count as failed."""

    def drain(self, deadline: float) -> bool:
        """Wait at most until ``deadline`` for all jobs to end, and return True if none is in flight."""

    def close(self, deadline: float) -> bool:
        """Shut down until ``deadline``, and return True if no thread runs any more."""

    def join(self) -> None:
        """Wait, after :meth:`close`, until no thread runs any more; any thread may call."""

"""What a tier needs of its I/O side: :class:`tiering.secondary.io.host.IoHost` has it, and so do the doubles of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiering.block_store import BlockStore
from tiering.secondary.io.layers.breaker import Breakers
from tiering.secondary.io.messages import IoJob, IoResult, IoTask
from tiering.secondary.io.stats import IoStats


class IoSide(Protocol):
    """Runs jobs and tasks elsewhere.  Called from the scheduler's thread; only :meth:`wait`, :meth:`drain` and :meth:`close` block."""

    @property
    def breakers(self) -> Breakers:
        """The tier's circuit breakers, for reads and for writes."""

    @property
    def store(self) -> BlockStore:
        """The store with its layers, for tasks."""

    @property
    def stats(self) -> IoStats:
        """What was moved."""

    def submit(self, job: IoJob) -> None:
        """Run a job; its result comes from :meth:`poll`."""

    def run(self, task: IoTask) -> None:
        """Run a task; its ``on_done`` is called by :meth:`poll`."""

    def poll(self) -> Sequence[IoResult]:
        """The jobs that have ended since the last call."""

    def wait(self, timeout: float) -> bool:
        """Wait until :meth:`poll` has something, at most ``timeout`` seconds; whether it has."""

    def discard(self) -> None:
        """Fail every job, or part of one, that no thread has begun: nobody wants its blocks any more."""

    def drain(self, deadline: float) -> bool:
        """Wait until no job is in flight."""

    def close(self, deadline: float) -> bool:
        """Stop; whether nothing runs any more."""

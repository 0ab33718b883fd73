"""Interface of a tier's I/O side: jobs and tasks go there, and come back when they have ended.

:class:`tiering.medium.host.IoHost` implements it, and so do simulations and fakes in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tiering.medium.block_store import BlockStore
from tiering.medium.layers.attempts import IoStats
from tiering.medium.layers.breaker import Breakers
from tiering.secondary.contract import TransferJob


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
        """Submit a task; :meth:`poll` calls its ``on_done``, also if no thread can be started for it."""

    @property
    def hanging_stores(self) -> int:
        """Number of threads that run a part of a store after its deadline."""

    def poll(self) -> Sequence[TransferJob]:
        """Return the jobs, with outcomes, that have ended since the last call: nothing of them runs."""

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` real seconds for :meth:`poll` to have something; return True if it has."""

    def drop_waiting(self) -> None:
        """Drop every job, or part of a job, that no thread has begun: its blocks count as failed."""

    def drain(self, deadline: float) -> bool:
        """Wait at most until ``deadline`` for all jobs to end, and return True if none runs or waits.

        :meth:`poll` still returns their results.
        """

    def close(self, deadline: float) -> bool:
        """Shut down: fail jobs and tasks that have not begun, and wait for the others until ``deadline``.

        After False, the method may be called again. The store is neither opened nor closed.

        Returns:
            True if no thread touches rows or the medium any more.
        """

    def join(self) -> None:
        """Wait, after :meth:`close`, until no thread runs any more; any thread may call."""

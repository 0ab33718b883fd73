"""Tasks of one kind, which threads do in the background, and the signal that a task has ended.

LMCache submits tasks and returns at once; it polls a file descriptor per kind of task, and takes the results. Nothing
here imports LMCache.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from tiering.errors import TierUnavailableError
from tiering.runtime.pool import LONGEST_START, ThreadPool

logger = logging.getLogger("kv_tiering.lmcache")

R = TypeVar("R")


class Notifier(Protocol):
    """A file descriptor that is readable after a signal."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def notify(self) -> None:
        """Make the descriptor readable."""

    def close(self) -> None:
        """Close the descriptor."""


class TaskLane(Generic[R]):
    """The tasks of one kind.

    Any thread may call all methods. Only :meth:`start` and :meth:`close` wait.

    Args:
        name: kind of the tasks, part of the threads' names.
        threads: number of tasks that run at the same time.
        notifier: signalled at the end of each task; the lane closes it.
    """

    def __init__(self, name: str, threads: int, notifier: Notifier) -> None:
        self._notifier = notifier
        self._threads = ThreadPool(f"kv-tiering-{name}", threads)
        self._lock = threading.Lock()
        self._results: dict[int, R] = {}
        self._numbers = itertools.count()
        self._closed = False
        self.descriptor = notifier.fileno()
        """The file descriptor that is readable once a task has ended."""

    def start(self) -> None:
        """Start the threads.

        Raises:
            TierUnavailableError: a thread cannot be started.
        """
        if not self._threads.start(LONGEST_START):
            reason = self._threads.shortage or f"they did not start within {LONGEST_START:g} s"
            raise TierUnavailableError(
                f"LMCache's adapter: threads {self._threads.name}: {reason}; raise the limit on threads"
            )

    def submit(self, work: Callable[[], R], failed: R) -> int:
        """Queue a task, and return its number.

        Args:
            work: returns the task's result.
            failed: result of the task if ``work`` fails.
        """
        number = next(self._numbers)

        def run() -> None:
            try:
                result = work()
            except Exception:
                logger.exception("a task of LMCache failed")
                result = failed
            self._ended(number, result)

        self._threads.run(run, lambda _: self._ended(number, failed))
        return number

    def post(self, work: Callable[[], object]) -> None:
        """Queue work without a result."""
        self._threads.run(work, lambda _: None)

    def take(self, number: int) -> R | None:
        """Return a task's result once; None if it has not ended, or was taken."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> Mapping[int, R]:
        """Return the results of all tasks that have ended and were not taken, by their numbers."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self, patience: float) -> None:
        """End the threads behind the tasks that are queued, and close the descriptor. May be called twice.

        Args:
            patience: seconds for which the threads are waited for.
        """
        self._threads.stop()
        if not self._threads.join(patience):
            logger.error("the threads %s did not end within %g s", self._threads.name, patience)
        with self._lock:
            self._closed = True
            self._notifier.close()

    def _ended(self, number: int, result: R) -> None:
        with self._lock:
            if not self._closed:  # the number of a closed descriptor may belong to another file
                self._results[number] = result
                self._notifier.notify()

"""Chores: background work of a tier that is repeated, or tried again after failures, on the I/O side."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tiering.medium.side import IoSide, IoTask

NEVER = float("inf")
"""Due time of a chore that has nothing to do."""


class Backoff:
    """Waits after failures in a row: each is twice as long as the one before, up to a bound.

    Args:
        first: seconds of the first wait.
        most: seconds of the longest wait; default: ``first``, so that all waits are equal.
        jitter: share by which a wait is longer or shorter at random; default: 0.2.
    """

    def __init__(self, first: float, most: float | None = None, jitter: float = 0.2) -> None:
        self._first = first
        self._most = first if most is None else most
        self._jitter = jitter
        self.failures = 0
        """Number of failures in a row; 0 after a success."""

    def failed(self, at_most: float = NEVER) -> float:
        """Record a failure, and return the seconds until the next attempt, at most about ``at_most``."""
        wait = min(self._first * 2.0 ** min(self.failures, 32), self._most, at_most)
        self.failures += 1
        return wait * random.uniform(1 - self._jitter, 1 + self._jitter)

    def succeeded(self) -> None:
        """Record a success: the waits start over."""
        self.failures = 0


class Chore:
    """Work on the I/O side that starts when it is due, one run at a time; owned by the scheduler's thread.

    Args:
        name: name of the task, for threads and logs.
        io: I/O side that runs the task.
        clock: function that returns monotonic seconds.
        begin: function that calls :meth:`run` with the present task, or plans another time; otherwise, the chore stays
            due.
        backoff: waits after failures; default None: a failure makes nothing due.
    """

    due: float
    """Time from which :meth:`tick` starts a run, in monotonic seconds."""
    running: bool
    """True from the start of a run to its end."""

    def __init__(
        self,
        name: str,
        io: IoSide,
        clock: Callable[[], float],
        begin: Callable[[], None],
        backoff: Backoff | None = None,
    ) -> None:
        self.due = NEVER
        self.running = False
        self._task_name = name
        self._io = io
        self._clock = clock
        self._begin_run = begin
        self._backoff = Backoff(NEVER) if backoff is None else backoff

    @property
    def failures(self) -> int:
        """Number of failures in a row; 0 after a success."""
        return self._backoff.failures

    def wake(self, seconds: float = 0.0) -> None:
        """Make a run due in ``seconds``, unless one is due earlier; default: now."""
        self.due = min(self.due, self._clock() + seconds)

    def tick(self, now: float) -> None:
        """Start a run if one is due."""
        if now >= self.due:
            self.start()

    def start(self) -> None:
        """Start a run if there is anything to do, due or not, unless one is running."""
        if not self.running:
            self._begin_run()

    def run(self, task: Callable[[], Any], ended: Callable[[Any, BaseException | None], None]) -> None:
        """Run ``task``. Nothing is due from now on; what becomes due meanwhile starts after the end.

        Args:
            task: function that an I/O thread calls.
            ended: function that the scheduler's thread calls with the task's result, or with its error.
        """

        def done(result: Any, error: BaseException | None) -> None:
            self.running = False
            ended(result, error)

        self.running, self.due = True, NEVER
        self._io.run(IoTask(self._task_name, task, done))

    def failed(self, at_most: float = NEVER) -> None:
        """Record that a run failed; the next one is due after a wait of at most about ``at_most`` seconds."""
        self.wake(self._backoff.failed(at_most))

    def succeeded(self) -> None:
        """Record that a run succeeded: the waits after failures start over."""
        self._backoff.succeeded()

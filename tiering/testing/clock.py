"""Time for tests: a clock that moves on command, and waiting for other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class FakeClock:
    """A clock of monotonic seconds that pass only on command. Any thread may use it.

    Call the object for the time; pass :meth:`sleep` to code that sleeps.

    Args:
        now: the first time, in seconds; default: 1000.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self.slept: list[float] = []
        """Lengths of all sleeps, in seconds."""

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        with self._lock:
            self._now += seconds

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass, record them as a sleep, and return at once."""
        with self._lock:
            self._now += seconds
            self.slept.append(seconds)


class SettableClock:
    """The clock of real monotonic seconds, which a test sets forward. Any thread may use it.

    Deadlines may be long then: they pass on command, and not because a machine is busy.
    """

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._skipped

    def advance(self, seconds: float) -> None:
        """Set the clock forward by ``seconds``."""
        self._skipped += seconds


def until(predicate: Callable[[], object], timeout: float = 30.0) -> bool:
    """Wait until ``predicate()`` holds, which another thread must bring about.

    Args:
        predicate: the condition.
        timeout: seconds of real time to wait at most; default: 30.

    Returns:
        True if the condition held in time.
    """
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not predicate():
        if time.monotonic() >= end:
            return False
        pause.wait(0.001)
    return True

"""Time for tests: a clock that moves when it is told to, and waiting for what other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class FakeClock:
    """Monotonic seconds that pass only when told.  Call it for the time; pass :meth:`sleep` where something sleeps.

    ``slept`` are the lengths of all sleeps.  Any thread may use it.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        with self._lock:
            self._now += seconds

    def sleep(self, seconds: float) -> None:
        """Sleep: the time passes, and the caller goes on at once."""
        with self._lock:
            self._now += seconds
            self.slept.append(seconds)


def until(predicate: Callable[[], object], timeout: float = 10.0) -> bool:
    """Wait until ``predicate()`` holds, which another thread brings about; whether it did within ``timeout`` seconds of real time."""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not predicate():
        if time.monotonic() >= end:
            return False
        pause.wait(0.001)
    return True

"""The notification of waiting callers when work ends on an I/O side, which replaces polling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count


class Steps:
    """Steps that repeat until one returns True or the timeout passes; the caller sleeps in between.

    Each step sees every job that ended before the step began. A caller that listens from then on misses no job.

    Args:
        step: does one step, and returns True if it was the last one.
        timeout: seconds until no further step is done; None: no limit.
        longest: longest sleep between two steps, in seconds.
    """

    def __init__(self, step: Callable[[], bool], timeout: float | None, longest: float) -> None:
        self._step = step
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._longest = longest
        self.done = False

    def next_sleep(self) -> float | None:
        """Do one step, and return the seconds to sleep before the next one; None if this step was the last."""
        self.done = self._step()
        if self.done:
            return None
        left = self._longest if self._deadline is None else self._deadline - time.monotonic()
        return None if left <= 0 else min(left, self._longest)


class News:
    """The list of listeners that are called whenever a job or task ends on an I/O side.

    All tiers of a manager share one instance. Without listeners, an announcement costs next to nothing.
    """

    __slots__ = ("_listeners", "_lock", "_numbers", "count")

    def __init__(self) -> None:
        self.count = 0
        """A number that every announcement changes; a number that was replaced never returns."""
        self._numbers = count(1)
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()

    def announce(self) -> None:
        """Call all listeners, because a job or a task has ended. Any thread may call."""
        self.count = next(self._numbers)
        for listener in self._listeners:
            listener()

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Register ``listener`` for the duration of the ``with`` block.

        Args:
            listener: called at each announcement, from any thread; must neither block nor raise.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

    def wait(self, steps: Steps, pause: float = 0.0) -> bool:
        """Do ``steps``, and sleep until an announcement in between. Return True if one of them was the last.

        Args:
            steps: the steps.
            pause: least time before each step, in seconds, for a caller that has just looked; default: 0.
        """
        news = threading.Event()
        if not pause:
            news.set()  # A second step follows at once: jobs may have ended before this function began to listen.
        with self.listening(news.set):
            time.sleep(pause)
            while (sleep := steps.next_sleep()) is not None:
                news.wait(max(0.0, sleep - pause))
                time.sleep(min(sleep, pause))
                # The event is cleared before the next step. A job that ends from here on is seen by that step, or ends
                # the sleep after it.
                news.clear()
        return steps.done

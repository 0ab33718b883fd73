"""The notification of waiting callers when work ends on an I/O side, which replaces polling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count


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

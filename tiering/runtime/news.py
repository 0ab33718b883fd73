"""How an I/O side tells a waiting caller that something has ended, so that the caller need not ask again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class News:
    """Calls those who listen whenever something has ended on an I/O side.

    One is shared by all tiers of a manager.  With nobody listening an announcement costs next to nothing.
    """

    __slots__ = ("_listeners", "_lock")

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()

    def announce(self) -> None:
        """Say that a job or a task has ended.  May be called from any thread."""
        for listener in self._listeners:
            listener()

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have ``listener`` called at each announcement until the block ends, from whatever thread; it must not block or raise."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

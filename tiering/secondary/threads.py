"""Threads of a tier, started where a process may have no more of them: a failure to start one is an answer, never an exception."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tiering.errors import TemporaryStoreError
from tiering.secondary.ratelimit import RateLimit

_log = logging.getLogger("kv_tiering.io")

_LOG_PERIOD = 30.0

RETRY_SECONDS = 1.0
"""How long a :class:`ThreadStarter` waits after a failure before :attr:`ThreadStarter.due` is true again, in seconds."""


class ThreadStarter:
    """Starts daemon threads for one tier, and remembers when that failed last.

    ``name``: the tier's name, for logs.  ``clock``: monotonic seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._due = float("-inf")
        self._lines = RateLimit(_LOG_PERIOD, clock)

    @property
    def due(self) -> bool:
        """Whether it is time to try again after a failure (always true while nothing has failed)."""
        return self._clock() >= self._due

    def start(self, name: str, target: Callable[[], object]) -> threading.Thread | TemporaryStoreError:
        """Run ``target`` in a thread called ``name``; returns the thread, or the reason why it cannot be started now."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._due = self._clock() + RETRY_SECONDS
            failure = TemporaryStoreError(
                f"thread {name} cannot be started ({error}); raise the limit on processes (ulimit -u, docker: --pids-limit)"
            )
            if count := self._lines.admit():
                _log.error("tier %s: %s; it is tried again (%d such failure(s))", self._name, failure, count)
            return failure
        return thread

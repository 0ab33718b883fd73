"""Starter of a tier's threads, for processes that may be out of threads.

A failure to start a thread is a return value, never an exception.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tiering.errors import TemporaryStoreError
from tiering.runtime.ratelimit import RateLimit

_log = logging.getLogger("kv_tiering.io")

_LOG_PERIOD = 30.0


class ThreadStarter:
    """Starts daemon threads for one tier, and logs failures at a limited rate.

    Args:
        name: name of the tier, for logs.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._lines = RateLimit(_LOG_PERIOD, clock)

    def start(self, name: str, target: Callable[[], object]) -> threading.Thread | TemporaryStoreError:
        """Run ``target`` in a thread called ``name``.

        Returns:
            The thread, or the reason why it cannot be started now.
        """
        thread = threading.Thread(target=target, name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            failure = TemporaryStoreError(
                f"thread {name} cannot be started ({error}); "
                "raise the limit on processes (ulimit -u, docker: --pids-limit)"
            )
            if count := self._lines.admit():
                _log.error("tier %s: %s; it is tried again (%d such failure(s))", self._name, failure, count)
            return failure
        return thread

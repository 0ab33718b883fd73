"""Threads that start on demand and delay neither one another nor the end of the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_log = logging.getLogger("kv_tiering.io")

IDLE_SECONDS = 30.0
"""Seconds after which a thread without work ends."""


class DaemonThreads:
    """Threads that run pieces of work, each as soon as a thread is free, in the order of submission.

    A thread starts when work waits and all others are busy. Any thread may call all methods.

    Args:
        name: prefix of the threads' names.
        most: largest number of threads.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.idle = 0
        """Number of threads that wait for work."""
        self._threads: set[threading.Thread] = set()
        self._stopped = False

    def run(self, work: Callable[[], object]) -> bool:
        """Run ``work`` on one of the threads.

        Returns:
            False if ``work`` will not run, because no thread runs and none can be started, or after :meth:`stop`.
        """
        with self._lock:
            if self._stopped:
                return False
            starts = self._waiting.qsize() >= self.idle and len(self._threads) < self._most
            if starts and not self._start() and not self._threads:
                return False
            self._waiting.put(work)
        return True

    def stop(self) -> None:
        """End the threads once the work submitted so far has been run; no further work is accepted."""
        with self._lock:
            self._stopped = True
            for _ in self._threads:
                self._waiting.put(None)

    def running(self) -> list[threading.Thread]:
        """Return the threads that run."""
        return [thread for thread in list(self._threads) if thread.is_alive()]

    def _start(self) -> bool:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            _log.debug("thread %s cannot be started: %s", self._name, error)
            return False
        self._threads.add(thread)
        return True

    def _serve(self) -> None:
        while True:
            with self._lock:
                self.idle += 1
            try:
                work = self._waiting.get(timeout=IDLE_SECONDS)
            except Empty:
                work = None
            with self._lock:
                self.idle -= 1
                if work is None and (self._stopped or self._waiting.empty()):
                    self._threads.discard(threading.current_thread())
                    return
            if work is None:
                continue
            try:
                work()
            except BaseException:
                _log.exception("thread %s: unexpected error; the thread goes on", self._name)

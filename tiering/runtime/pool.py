"""Pools of daemon threads that are started before there is work for them.

``threading.Thread.start`` returns once the new thread runs, which can take a large part of a second on a busy machine.
A step of the scheduler must not wait for that. A pool therefore starts all its threads at once, from a thread that
:meth:`ThreadPool.start` begins without waiting for it. Afterwards they are parked, and work only wakes them.

Threads are daemons: a thread that hangs in a medium delays neither other threads nor the end of the process.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from tiering.errors import TemporaryStoreError

_log = logging.getLogger("kv_tiering.io")

RETRY_SECONDS = 1.0
"""Seconds after a failure to start threads until work that is submitted tries again."""

LONGEST_START = 10.0
"""Seconds after which work is refused if the first thread of a pool has not begun to run."""

Refused = Callable[[TemporaryStoreError], object]
"""Function that is called in place of work that no thread will run. It must not block."""


class ThreadPool:
    """Daemon threads that run pieces of work in the order of submission.

    Any thread may call all methods. Only :meth:`start` and :meth:`join` wait.

    Args:
        name: name of the threads, to which their numbers are appended.
        size: number of threads.
        clock: function that returns monotonic seconds; default: ``time.monotonic``.
    """

    def __init__(self, name: str, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        """Name of the threads, without their numbers."""
        self.size = size
        """Number of threads once all have been started."""
        self.shortage: BaseException | None = None
        """Reason why the last attempt to start all threads failed; None if none has failed."""
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[tuple[Callable[[], object], Refused] | None] = SimpleQueue()
        self._clock = clock
        self._growth = threading.Lock()
        """Held while threads are being started."""
        self._growth_began = 0.0
        self._retry_due = float("-inf")
        self._stopped = False

    @property
    def alive(self) -> int:
        """Number of threads that were started."""
        return len(self._threads)

    @property
    def starting(self) -> bool:
        """True while threads are being started."""
        return self._growth.locked()

    def start(self, timeout: float = 0.0) -> bool:
        """Start the threads that do not run yet, and return True if all run.

        Args:
            timeout: longest wait for the threads, in seconds; default 0. They are started in any case.
        """
        self._grow()
        if timeout > 0 and self._growth.acquire(timeout=timeout):
            self._growth.release()
        return len(self._threads) == self.size

    def run(self, work: Callable[[], object], refused: Refused) -> None:
        """Run ``work`` on one of the threads.

        Args:
            work: function that a thread calls.
            refused: called instead, by any thread, if no thread runs and none can be started, or after :meth:`stop`.
        """
        if self._stopped:
            refused(TemporaryStoreError(f"the threads {self.name} have been stopped"))
            return
        self._waiting.put((work, refused))
        if len(self._threads) < self.size:
            self._grow()
        self._refuse_in_vain()

    def stop(self) -> None:
        """End the threads once the work submitted so far has been run; no further work is accepted."""
        self._stopped = True
        self._waiting.put(None)
        self._refuse_in_vain()

    def join(self, timeout: float | None = None) -> bool:
        """Wait after :meth:`stop` until no thread runs any more, and return True if none does.

        Args:
            timeout: longest wait in seconds; default: none.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if not self._growth.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False  # threads are still being started
        self._growth.release()
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _grow(self) -> None:
        """Begin to start the missing threads, unless that is under way or has just failed.

        The low-level call does not wait until its thread runs.
        """
        now = self._clock()
        if now < self._retry_due or self._stopped or not self._growth.acquire(blocking=False):
            return
        self._growth_began = now
        try:
            _thread.start_new_thread(self._start_threads, ())
        except (RuntimeError, MemoryError) as error:
            self._end_growth(error)

    def _start_threads(self) -> None:
        error: BaseException | None = None
        # After a stop, one thread is enough for the work that was submitted before.
        while len(self._threads) < (1 if self._stopped else self.size):
            thread = threading.Thread(target=self._serve, name=f"{self.name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as reason:
                error = reason
                break
            self._threads.append(thread)
        self._end_growth(error)

    def _end_growth(self, error: BaseException | None) -> None:
        self.shortage = error
        if error is not None:
            self._retry_due = self._clock() + RETRY_SECONDS
        self._growth.release()
        self._refuse_in_vain()

    def _refuse_in_vain(self) -> None:
        """Refuse all work that waits, if no thread is there to run it.

        A failure to start threads is recorded before this look at the queue, and work is queued before its caller looks
        at the threads. One of the two therefore finds the work.
        """
        if self._threads or (self.starting and self._clock() - self._growth_began < LONGEST_START):
            return
        while True:
            try:
                item = self._waiting.get_nowait()
            except Empty:
                return
            if item is not None:
                item[1](self._failure())

    def _failure(self) -> TemporaryStoreError:
        return TemporaryStoreError(
            f"threads {self.name} cannot be started ({self.shortage or 'their start hangs'}); "
            "raise the limit on processes (ulimit -u, docker: --pids-limit) or on memory (ulimit -v)"
        )

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                item[0]()
            except BaseException:
                _log.exception("thread %s: unexpected error; the thread goes on", threading.current_thread().name)
            item = None  # the work may hold much memory
        self._waiting.put(None)  # for the next thread

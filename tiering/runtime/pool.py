"""Pools of daemon threads that are started before there is work for them.

``threading.Thread.start`` returns once the new thread runs, which can take a large part of a second on a busy machine.
A step of the scheduler must not wait for that. A pool therefore starts all its threads at once, from a thread that
:meth:`ThreadPool.start` begins without waiting for it. Afterwards they are parked, and work only wakes them.

Threads are daemons: a thread that hangs in a medium delays neither other threads nor the end of the process.

At a limit on threads, pools share. A pool that has hardly any thread, and cannot start one, gets room from the pool
that has the most: some threads of that pool end.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from queue import Empty, SimpleQueue

from tiering.errors import TemporaryStoreError

_log = logging.getLogger("kv_tiering.io")

RETRY_SECONDS = 1.0
"""Seconds after a failure to start threads until work that is submitted tries again."""

LONGEST_START = 10.0
"""Seconds after which work is refused if the first thread of a pool has not begun to run."""

FEW_THREADS = 2
"""Threads that each pool gets at a limit, as far as other pools have more."""

LENT_SECONDS = 30.0
"""Seconds after which a pool that has given up threads tries to start them again."""

_SHARE_SECONDS, _SHARE_LOOK_SECONDS = 0.5, 0.01
"""Longest wait of a start for room from another pool, and the time between two attempts."""

Refused = Callable[[TemporaryStoreError], object]
"""Function that is called in place of work that no thread will run. It must not block."""

_Work = tuple[Callable[[], object], Refused]


class _Order(Enum):
    """Order to a thread of a pool, in place of work."""

    END = auto()
    """The pool is stopped; the thread puts the order back for the next thread."""
    LEAVE = auto()
    """One thread shall end, to make room for a thread of another pool."""


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
        self.size = size
        """Number of threads once all have been started."""
        self.shortage: BaseException | None = None
        """Reason why the last attempt to start all threads failed; None if none has failed."""
        self._threads: list[threading.Thread] = []
        self._ended: list[threading.Thread] = []
        """Threads that run no further work because the pool was stopped."""
        self._waiting: SimpleQueue[_Work | _Order] = SimpleQueue()
        self._clock = clock
        self._growth = threading.Lock()
        """Held while threads are being started."""
        self._leaving = threading.Lock()
        """Held by a thread that ends to make room for another pool's."""
        self._growth_began = 0.0
        self._retry_due = float("-inf")
        self._awaits_room = False
        """True if another pool gives up threads for this one."""
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
        end = time.monotonic() + timeout
        patience = min(end, time.monotonic() + _SHARE_SECONDS)
        while True:
            self._grow()
            if timeout > 0 and self._growth.acquire(timeout=max(0.0, end - time.monotonic())):
                self._growth.release()
            if self.starting or not self._poor or not self._awaits_room or time.monotonic() >= patience:
                return len(self._threads) == self.size
            time.sleep(_SHARE_LOOK_SECONDS)
            self._retry_due = float("-inf")

    def run(self, work: Callable[[], object], refused: Refused) -> None:
        """Run ``work`` on one of the threads.

        Args:
            work: function that a thread calls.
            refused: called instead, by any thread, if no thread runs and none can be started, or after :meth:`stop`.
                If another thread calls :meth:`stop` meanwhile, either the work is run, or this function is called.
        """
        if self._stopped:
            refused(self._failure())
            return
        self._waiting.put((work, refused))
        if len(self._threads) < self.size:
            self._grow()
        self._refuse_in_vain()

    def stop(self) -> None:
        """End the threads once the work submitted so far has been run; no further work is accepted."""
        self._stopped = True
        self._waiting.put(_Order.END)
        self._refuse_in_vain()
        with suppress(ValueError):
            _LARGE.remove(self)

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
            self._awaits_room = self._poor and self._ask_for_room(error)
        if len(self._threads) > FEW_THREADS and not self._stopped and self not in _LARGE:
            _LARGE.append(self)
        self._growth.release()
        self._refuse_in_vain()

    # --------------------------------------------------------------------------------------------------- shared threads

    @property
    def _poor(self) -> bool:
        return len(self._threads) < min(FEW_THREADS, self.size)

    def _ask_for_room(self, shortage: BaseException) -> bool:
        """Ask the largest pool to give up threads, and return True if it will."""
        others = [pool for pool in list(_LARGE) if pool is not self and not pool._stopped]
        largest = max(others, key=lambda pool: pool.alive, default=None)
        return largest is not None and largest._give_up(self.alive, shortage)

    def _give_up(self, alive: int, shortage: BaseException) -> bool:
        """Let threads end for a pool that has ``alive`` threads; return False if none can be spared.

        The other pool needs one thread more for a moment, which starts the others.
        """
        count = min(FEW_THREADS + 1 - alive, len(self._threads) - 1 - alive)
        if count < 2:
            return False
        self.shortage = shortage
        self._retry_due = self._clock() + LENT_SECONDS
        for _ in range(count):
            self._waiting.put(_Order.LEAVE)
        return True

    def _leave(self) -> bool:
        """Take the calling thread out of the pool, and return False if no other thread would be left."""
        me = threading.current_thread()
        with self._leaving:
            if len(self._threads) < 2 or me not in self._threads:
                return False
            self._threads.remove(me)
        return True

    # --------------------------------------------------------------------------------------------------- refusals, work

    def _refuse_in_vain(self) -> None:
        """Refuse all work that waits, if no thread is there to run it.

        A failure to start threads, and the end of a thread, are recorded before this look at the queue. Work is queued
        before its caller looks at the threads. One of the two therefore finds the work.
        """
        if len(self._threads) > len(self._ended):
            return
        if self.starting and self._clock() - self._growth_began < LONGEST_START:
            return
        while True:
            try:
                item = self._waiting.get_nowait()
            except Empty:
                break
            if isinstance(item, tuple):
                item[1](self._failure())
        if self._stopped:
            self._waiting.put(_Order.END)  # for a thread whose start hangs

    def _failure(self) -> TemporaryStoreError:
        if self._stopped:
            return TemporaryStoreError(f"the threads {self.name} have been stopped")
        return TemporaryStoreError(
            f"threads {self.name} cannot be started ({self.shortage or 'their start hangs'}); "
            "raise the limit on processes (ulimit -u, docker: --pids-limit) or on memory (ulimit -v)"
        )

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not _Order.END:
            if isinstance(item, tuple):
                try:
                    item[0]()
                except BaseException:
                    _log.exception("thread %s: unexpected error; the thread goes on", threading.current_thread().name)
            elif self._leave():
                return
            del item  # the work may hold much memory
        self._ended.append(threading.current_thread())
        self._waiting.put(_Order.END)  # for the next thread
        self._refuse_in_vain()


_LARGE: list[ThreadPool] = []
"""Pools that may give up threads."""

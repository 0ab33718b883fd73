"""Threads that start on demand and delay neither one another nor the end of the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from tiering.runtime.launch import Launch, Seats

_log = logging.getLogger("kv_tiering.io")

IDLE_SECONDS = 30.0
"""Seconds after which a thread without work ends."""

_Work = tuple[Callable[[], object], Callable[[], object]]


class DaemonThreads:
    """Threads that run pieces of work, each as soon as a thread is free, in the order of submission.

    A thread starts when work waits and all others are busy. Any thread may call all methods; none of them waits.

    Args:
        name: name of the threads.
        most: largest number of threads.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards :attr:`idle`; only the threads take it."""
        self.idle = 0
        """Number of threads that wait for work."""
        self._seats = Seats()
        self._stopped = False

    def run(self, work: Callable[[], object], refused: Callable[[], object]) -> None:
        """Run ``work`` on one of the threads.

        Args:
            work: function that a thread calls.
            refused: called instead, by any thread, if no thread runs and none can be started, or after :meth:`stop`.
                It must not block.
        """
        if self._stopped:
            refused()
            return
        self._waiting.put((work, refused))
        if self._waiting.qsize() > self.idle + len(self._seats.starting):
            self._seats.take(self._most, self._launch)
        if not self._seats.taken and not self._stopped:
            # The last thread has just ended, for lack of work.
            self._seats.take(self._most, self._launch)
        if not self._seats.taken:
            self._refuse()

    def stop(self) -> None:
        """End the threads once the work submitted so far has been run; no further work is accepted.

        Threads whose start has not begun are given up, but for one that work waits for and no other thread would run.
        """
        self._stopped = True
        starting = len(self._seats.starting)
        self._seats.cancel_seats(keep=int(not self._waiting.empty() and len(self._seats.taken) <= starting))
        self._waiting.put(None)

    def running(self) -> list[Launch]:
        """Return the threads that run or are about to start."""
        return self._seats.running()

    def _launch(self, seat: int) -> Launch:
        return Launch(self._name, partial(self._serve, seat), partial(self._unstarted, seat))

    def _unstarted(self, seat: int, error: BaseException | None) -> None:
        _log.debug("thread %s cannot be started: %s", self._name, error)
        self._seats.leave(seat)
        if not self._seats.taken:
            self._refuse()

    def _refuse(self) -> None:
        """Refuse all work that waits, because no thread is there to run it.

        A thread leaves its seat before it looks at the queue for the last time, and a caller puts its work before it
        looks at the seats. One of the two therefore finds the work.
        """
        while True:
            try:
                item = self._waiting.get_nowait()
            except Empty:
                return
            if item is not None:
                item[1]()

    def _serve(self, seat: int) -> None:
        self._seats.begun(seat)
        while True:
            with self._lock:
                self.idle += 1
            try:
                item = self._waiting.get(timeout=0.0 if self._stopped else IDLE_SECONDS)
            except Empty:
                item = None
            with self._lock:
                self.idle -= 1
            if item is None:
                if self._ended(seat):
                    return
                continue
            try:
                item[0]()
            except BaseException:
                _log.exception("thread %s: unexpected error; the thread goes on", self._name)
            item = None

    def _ended(self, seat: int) -> bool:
        """Return True if the calling thread must end; it has left its seat then."""
        launch = self._seats.leave(seat)
        if not self._stopped:
            return self._waiting.empty() or not self._seats.take_again(seat, launch)
        if self._seats.taken:
            self._waiting.put(None)  # for the next thread
        else:
            self._refuse()
        return True

"""Threads of a tier's I/O side: workers, substitutes for workers that hang, and background threads.

Threads are daemons: a thread that hangs in a medium delays neither other threads nor the end of the process. While
threads are stuck in work after its deadline, substitute threads run, at most as many again. They end when the stuck
threads return.

A worker starts when work waits that no other worker is free for. No caller waits for the start
(:mod:`tiering.runtime.launch`). A thread that cannot be started (the process or its container has reached a limit) is
tried again later. The failure reaches a callback, and is never an exception.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from tiering.errors import TemporaryStoreError
from tiering.runtime.launch import Launch, Seats
from tiering.runtime.ratelimit import RateLimit

_log = logging.getLogger("kv_tiering.io")

THREAD_RETRY_SECONDS = 0.1
"""Seconds after a failure to start an I/O thread until the next try."""

_LOG_PERIOD = 30.0
_HANG_LOG_PERIOD = 10.0


class IoThreads:
    """Threads of one tier. Any thread may call all methods; none of them waits.

    No thread starts before the first call of :meth:`wake`.

    Args:
        name: name of the tier.
        most: largest number of threads that share the work, substitutes left out.
        work: function that runs one waiting item and returns True, or returns False if there is none to run.
        room: function that returns the number of items that could have a thread each now.
        stuck: function that returns the number of threads that are stuck in work after its deadline.
        abandon: function that a thread calls once the tier is closing, before the thread ends.
        refused: function that receives the number of threads that run when a further one cannot be started.
        stopping: event that is set when the tier closes.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        most: int,
        *,
        work: Callable[[], bool],
        room: Callable[[], int],
        stuck: Callable[[], int],
        abandon: Callable[[], None],
        refused: Callable[[int], None],
        stopping: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self.idle = 0
        """Number of threads that wait for a token."""
        self._name = name
        self._most = most
        self._work = work
        self._room = room
        self._stuck = stuck
        self._abandon = abandon
        self._refused = refused
        self._stopping = stopping
        self._clock = clock
        self._tokens: SimpleQueue[None] = SimpleQueue()
        """Queue from which a thread without work takes a token before it looks for an item."""
        self._lock = threading.Lock()
        """Guards :attr:`idle`, and the number of threads that end; only the threads take it."""
        self._seats = Seats()
        self._start_due = float("-inf")
        self._unstarted = RateLimit(_LOG_PERIOD, clock)
        self._hanging = RateLimit(_HANG_LOG_PERIOD, clock)

    @property
    def alive(self) -> int:
        """Number of threads that share the work and run or are about to start, substitutes included."""
        return len(self._seats.taken)

    def wake(self) -> bool:
        """Make a thread look for an item; a thread is started for it if no other is free.

        A thread that finds further items wakes the next thread. A burst of items therefore leaves one token only, and
        costs its caller one system call.

        Returns:
            False if no thread runs and none is about to start.
        """
        taken = self._seats.taken
        # The thread that takes the present token looks for items afterwards, and so finds this one too.
        if taken and not self._tokens.qsize():
            self._tokens.put(None)
        if self._tokens.qsize() > self.idle or not taken:
            self._start_one()
        return bool(taken)

    def replace_stuck(self) -> bool:
        """Wake a thread for waiting items, with a substitute if all threads hang.

        Repeated calls while nothing changes leave no more tokens.

        Returns:
            False if no thread runs and none is about to start.
        """
        alive = self.alive
        if not alive or self._tokens.qsize() <= self.idle:
            self.wake()
        else:
            self._start_one()
        if self.alive > alive and (stuck := self._stuck()) and (count := self._hanging.admit(stuck)):
            _log.warning("tier %s: %d I/O thread(s) hang in the medium, others are started", self._name, count)
        return self.alive > 0

    def run_alone(
        self, name: str, target: Callable[[], object], refused: Callable[[TemporaryStoreError], object]
    ) -> None:
        """Run ``target`` in a thread of its own.

        Args:
            name: end of the thread's name.
            target: function that the thread runs.
            refused: called instead, by any thread, with the reason why the thread cannot be started.
        """

        def unstarted(error: BaseException | None) -> None:
            if error is None:
                refused(TemporaryStoreError(f"tier {self._name} is closing"))
            else:
                refused(self._failure(launch.name, error))

        launch = Launch(f"kv-{self._name}-{name}", target, unstarted)
        self._seats.begin(launch)

    def stop(self) -> None:
        """Make all threads look at the event that the tier closes; give up those whose start has not begun."""
        self._seats.cancel()
        for _ in range(self.alive):
            self._tokens.put(None)

    def running(self) -> list[Launch]:
        """Return the threads that run or are about to start."""
        return self._seats.running()

    def _start_one(self) -> None:
        """Request one more thread, unless there are enough or none can be started now."""
        seats = self._seats
        if self._stopping.is_set() or self._clock() < self._start_due:
            return
        limit = self._most + self._stuck()
        if len(seats.taken) < limit and (not seats.taken or len(seats.starting) < self._room()):
            seats.take(limit, self._launch)
            if self._stopping.is_set():
                seats.cancel()  # the tier may have looked at its threads before the seat was taken

    def _launch(self, seat: int) -> Launch:
        name = f"kv-{self._name}-io-{seat}"
        return Launch(name, partial(self._run, seat), partial(self._give_up, seat, name))

    def _give_up(self, seat: int, name: str, error: BaseException | None) -> None:
        """Free the seat of a thread that cannot be started for ``error``, or was cancelled."""
        if error is None:
            self._seats.leave(seat)
            return
        self._start_due = self._clock() + THREAD_RETRY_SECONDS
        self._seats.leave(seat)
        self._seats.cancel_seats()
        self._failure(name, error)
        self._refused(self.alive)

    def _failure(self, name: str, error: BaseException) -> TemporaryStoreError:
        """Log why the thread ``name`` cannot be started now, and return it as an error."""
        failure = TemporaryStoreError(
            f"thread {name} cannot be started ({error}); "
            "raise the limit on processes (ulimit -u, docker: --pids-limit) or on memory (ulimit -v)"
        )
        if count := self._unstarted.admit():
            _log.error("tier %s: %s; it is tried again (%d such failure(s))", self._name, failure, count)
        return failure

    # -------------------------------------------------------------------------------------------------- in the threads

    def _run(self, seat: int) -> None:
        self._seats.begun(seat)
        while not self._stopping.is_set():
            try:
                while self._work():
                    if self._stopping.is_set():
                        break
            except BaseException:
                _log.exception("tier %s: an I/O thread met an error outside a job", self._name)
            if self._stopping.is_set():
                break
            if self.alive > self._most and self._leave(seat):
                return
            with self._lock:
                self.idle += 1
            self._tokens.get()
            with self._lock:
                self.idle -= 1
        self._abandon()

    def _leave(self, seat: int) -> bool:
        """Return True if the calling thread is surplus and must end."""
        with self._lock:
            if self.alive <= self._most + self._stuck():
                return False
            self._seats.leave(seat)
            return True

"""Threads of a tier's I/O side: workers, substitutes for workers that hang, and background threads.

Threads are daemons: a thread that hangs in a medium delays neither other threads nor the end of the process. While
threads are stuck in work after its deadline, substitute threads run, at most as many again. They end when the stuck
threads return.

A worker starts when work waits that no other worker is free for. A thread that cannot be started (the process or its
container has reached a limit) is tried again later. A failure to start a thread is a return value, never an exception.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from tiering.errors import TemporaryStoreError
from tiering.runtime.ratelimit import RateLimit

_log = logging.getLogger("kv_tiering.io")

THREAD_RETRY_SECONDS = 0.1
"""Seconds after a failure to start an I/O thread until the next try."""

_LOG_PERIOD = 30.0
_HANG_LOG_PERIOD = 10.0


class IoThreads:
    """Threads of one tier.

    Any thread may call :meth:`start_one`, and does so if it has put more tokens than threads are idle. The scheduler's
    thread calls all other methods. No thread starts before the first call of :meth:`ensure`.

    Args:
        name: name of the tier.
        most: largest number of threads that share the work, substitutes left out.
        work: function that runs one waiting item and returns True, or returns False if there is none to run.
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
        stuck: Callable[[], int],
        abandon: Callable[[], None],
        refused: Callable[[int], None],
        stopping: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self.alive = 0
        """Number of threads that share the work and run, substitutes included."""
        self.idle = 0
        """Number of threads that wait for a token."""
        self.tokens: SimpleQueue[None] = SimpleQueue()
        """Queue from which a thread without work takes a token before it looks for an item.

        Any thread may put one.
        """
        self._name = name
        self._most = most
        self._work = work
        self._stuck = stuck
        self._abandon = abandon
        self._refused = refused
        self._stopping = stopping
        self._clock = clock
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._sharing: list[threading.Thread] = []
        self._background: list[threading.Thread] = []
        self._started = 0
        self._start_due = float("-inf")
        self._unstarted = RateLimit(_LOG_PERIOD, clock)
        self._hanging = RateLimit(_HANG_LOG_PERIOD, clock)

    def ensure(self) -> bool:
        """Start a thread unless one runs, and return True if at least one runs."""
        if not self.alive:
            self.start_one()
        return self.alive > 0

    def replace_stuck(self) -> None:
        """Wake a thread for waiting items, with a substitute if all threads hang."""
        if not self.alive or self._stopping.is_set():
            return
        alive = self.alive
        self.tokens.put(None)
        if self.tokens.qsize() > self.idle:
            self.start_one()
        if self.alive > alive and (stuck := self._stuck()) and (count := self._hanging.admit(stuck)):
            _log.warning("tier %s: %d I/O thread(s) hang in the medium, others were started", self._name, count)

    def run_alone(self, name: str, target: Callable[[], object]) -> TemporaryStoreError | None:
        """Run ``target`` in a thread of its own called ``name``, and return the error if none can be started."""
        self._background = [thread for thread in self._background if thread.is_alive()]
        started = self._start(f"kv-{self._name}-{name}", target)
        if isinstance(started, TemporaryStoreError):
            return started
        self._background.append(started)
        return None

    def stop(self) -> None:
        """Make all threads look at the event that the tier closes."""
        for _ in range(self.alive):
            self.tokens.put(None)

    def running(self) -> list[threading.Thread]:
        """Return the threads that run."""
        return [thread for thread in [*self._sharing, *self._background] if thread.is_alive()]

    def start_one(self, *, patient: bool = False) -> None:
        """Start one more thread, unless there are enough or none can be started now.

        Args:
            patient: True to wait while another thread starts one; default False. I/O threads wait, because a thread
                that begins an item must wake the next one.
        """
        if self._stopping.is_set() or self._clock() < self._start_due or self.alive >= self._most + self._stuck():
            return
        if not self._starting.acquire(blocking=patient):
            return
        try:
            with self._lock:
                self.alive += 1
            started = self._start(f"kv-{self._name}-io-{self._started}", self._run)
            if isinstance(started, TemporaryStoreError):
                with self._lock:
                    self.alive -= 1
                self._start_due = self._clock() + THREAD_RETRY_SECONDS
                self._refused(self.alive)
            else:
                self._started += 1
                self._sharing = [*(thread for thread in self._sharing if thread.is_alive()), started]
        finally:
            self._starting.release()

    def _start(self, name: str, target: Callable[[], object]) -> threading.Thread | TemporaryStoreError:
        """Return a started thread, or the reason why it cannot be started now."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            failure = TemporaryStoreError(
                f"thread {name} cannot be started ({error}); "
                "raise the limit on processes (ulimit -u, docker: --pids-limit)"
            )
            if count := self._unstarted.admit():
                _log.error("tier %s: %s; it is tried again (%d such failure(s))", self._name, failure, count)
            return failure
        return thread

    # -------------------------------------------------------------------------------------------------- in the threads

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                while self._work():
                    if self._stopping.is_set():
                        break
            except BaseException:
                _log.exception("tier %s: an I/O thread met an error outside a job", self._name)
            if self._stopping.is_set():
                break
            if self.alive > self._most and self._leave():
                return
            with self._lock:
                self.idle += 1
            self.tokens.get()
            with self._lock:
                self.idle -= 1
        self._abandon()

    def _leave(self) -> bool:
        """Return True if the calling thread is surplus and must end."""
        with self._lock:
            if self.alive <= self._most + self._stuck():
                return False
            self.alive -= 1
            return True

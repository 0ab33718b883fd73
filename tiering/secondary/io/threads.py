"""Threads of a tier's I/O side: workers, substitutes for workers that hang, and background threads.

Threads are daemons: a thread that hangs in a medium delays neither other threads nor the end of the process. While
threads are stuck in work after its deadline, substitute threads run, at most as many again. They end when the stuck
threads return.

A thread that cannot be started (the process or its container has reached a limit) is tried again later. A failure to
start a thread is a return value, never an exception.
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

    The scheduler's thread calls all methods. Threads start when :meth:`ensure` is called first.

    Args:
        name: name of the tier.
        count: number of threads that share the work.
        work: function that runs one waiting item, if there is one; called once per token.
        abandon: function that a thread calls once the tier is closing, before the thread ends.
        stopping: event that is set when the tier closes.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        count: int,
        *,
        work: Callable[[], None],
        abandon: Callable[[], None],
        stopping: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self.count = count
        """Number of threads that share the work, substitutes left out."""
        self.alive = 0
        """Number of threads that share the work and run, substitutes included."""
        self.deadlines: dict[threading.Thread, float] = {}
        """Deadline of the work that each thread runs; a thread enters and removes its own."""
        self.tokens: SimpleQueue[None] = SimpleQueue()
        """Queue from which a thread takes a token before it looks for an item.

        Any thread may put one. There are at least as many tokens as waiting items, so a thread that finds no item for
        its token takes the next token.
        """
        self._name = name
        self._work = work
        self._abandon = abandon
        self._stopping = stopping
        self._clock = clock
        self._lock = threading.Lock()
        self._sharing: list[threading.Thread] = []
        self._background: list[threading.Thread] = []
        self._start_due = float("-inf")
        self._unstarted = RateLimit(_LOG_PERIOD, clock)
        self._hanging = RateLimit(_HANG_LOG_PERIOD, clock)

    def ensure(self) -> bool:
        """Start the threads unless some run, and return True if at least one runs."""
        if not self.alive and self._clock() >= self._start_due:
            self._add(self.count)
        return self.alive > 0

    def replace_stuck(self) -> None:
        """Start substitutes for threads that hang, and threads that could not be started before."""
        if not self.alive or self._clock() < self._start_due or self._stopping.is_set():
            return
        stuck = min(self._stuck(), self.count)
        missing = self.count + stuck - self.alive
        if missing > 0:
            if stuck and (count := self._hanging.admit(stuck)):
                _log.warning("tier %s: %d I/O thread(s) hang in the medium, starting others", self._name, count)
            self._add(missing)

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
        for _ in self._sharing:
            self.tokens.put(None)

    def running(self) -> list[threading.Thread]:
        """Return the threads that run."""
        return [thread for thread in [*self._sharing, *self._background] if thread.is_alive()]

    def _add(self, count: int) -> None:
        """Start up to ``count`` more threads, stopping at the first that cannot be started."""
        self._sharing = [thread for thread in self._sharing if thread.is_alive()]
        for number in range(count):
            with self._lock:
                self.alive += 1
            started = self._start(f"kv-{self._name}-io-{number}", self._run)
            if isinstance(started, TemporaryStoreError):
                with self._lock:
                    self.alive -= 1
                self._start_due = self._clock() + THREAD_RETRY_SECONDS
                return
            self._sharing.append(started)

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

    def _stuck(self) -> int:
        """Return the number of threads that run work after its deadline."""
        now = self._clock()
        return sum([deadline <= now for deadline in list(self.deadlines.values())])

    # -------------------------------------------------------------------------------------------------- in the threads

    def _run(self) -> None:
        while True:
            self.tokens.get()
            if self._stopping.is_set():
                self._abandon()
                return
            try:
                self._work()
            except BaseException:
                _log.exception("tier %s: an I/O thread met an error outside a job", self._name)
            if self.alive > self.count and self._leave():
                return

    def _leave(self) -> bool:
        """Return True if the calling thread is surplus and must end."""
        with self._lock:
            if self.alive <= self.count + self._stuck():
                return False
            self.alive -= 1
            return True

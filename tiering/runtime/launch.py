"""The start of daemon threads without a wait.

``threading.Thread.start`` returns once the new thread runs. That takes as long as other threads keep the interpreter
lock, which can be a large part of a second on a busy machine. A step of the scheduler must not wait for it. One thread
of the process, the starter, therefore starts all threads that may be needed on a step, in the order of the requests.

The starter begins with the first launch of the process, which belongs to the opening of a tier, and lives as long as
the process. If it cannot be started, launches are refused, and a later launch tries again.

A start may hang, for example if the new thread finds no memory for its first steps. A second thread therefore watches
the starter. A start that takes longer than :data:`LONGEST_START` is given up: its launch is refused, and another
starter goes on with the launches behind it. The number of starters is bounded. While all of them hang, launches are
refused.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

_log = logging.getLogger("kv_tiering.io")

STARTER_NAME = "kv-tiering-starter"
"""Name of the thread that starts others."""

LONGEST_START = 10.0
"""Seconds after which the start of a thread is given up.

On an overloaded machine, a start may take a large part of a second.
"""

MAX_STARTERS = 4
"""Largest number of starters, those included whose start hangs."""

_RETRY_SECONDS = 0.1
"""Seconds after a failure to start the starter until the next try."""

Refused = Callable[[BaseException | None], object]
"""Function that any thread calls if a launched thread will not run.

Its argument is the reason why the thread cannot be started, or None after :meth:`Launch.cancel`. It must not block.
"""


class Launch:
    """One daemon thread that the starter starts after :meth:`begin`. Any thread may call all methods.

    Args:
        name: name of the thread.
        target: function that the thread runs.
        refused: called once instead of ``target``.
    """

    __slots__ = ("_claim", "_outcome", "_process", "_refused", "_settled", "_target", "_thread", "name")

    def __init__(self, name: str, target: Callable[[], object], refused: Refused) -> None:
        self.name = name
        """Name of the thread."""
        self._target = target
        self._refused = refused
        self._process = _starter.process
        self._claim = threading.Lock()
        """Taken by the first of two: the starter, or :meth:`cancel`."""
        self._outcome = threading.Lock()
        """Taken by the first of two: the started thread, or the report that it will not run."""
        self._settled = threading.Event()
        """Set once the thread runs, or ``refused`` has returned."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Request the thread; returns at once. Only one call counts.

        ``refused`` is called before the return if there is no starter and none can be started.
        """
        _starter.request(self)

    def cancel(self) -> None:
        """Give the thread up unless its start has begun: ``refused`` is called with None before the return."""
        self.refuse(None)

    def is_alive(self) -> bool:
        """Return True until the thread has ended, or will never run; a thread not started yet counts as alive."""
        if self._process is not _starter.process:
            return False  # a forked child: the thread is the parent's
        if not self._settled.is_set():
            return True
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until :meth:`is_alive` returns False.

        Args:
            timeout: longest wait in seconds; default: none.
        """
        if not self.is_alive():
            return
        end = None if timeout is None else time.monotonic() + timeout
        if self._settled.wait(timeout) and self._thread is not None:
            self._thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def refuse(self, error: BaseException | None) -> None:
        """Call ``refused`` with ``error`` unless the thread was started, refused or cancelled."""
        if self._claim.acquire(blocking=False):
            self._settle(error)

    def start(self) -> None:
        """Start the thread unless it was cancelled. The starter calls this method."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
        except Exception as error:
            self._settle(error)
        else:
            self._thread = thread
            self._settled.set()

    def give_up(self, error: BaseException) -> None:
        """Refuse the thread for ``error``, although its start has begun, unless it runs already."""
        self._settle(error)

    def _run(self) -> None:
        if not self._outcome.acquire(blocking=False):
            return
        target, self._target, self._refused = self._target, _nothing, _nothing
        target()

    def _settle(self, error: BaseException | None) -> None:
        if not self._outcome.acquire(blocking=False):
            return
        refused, self._target, self._refused = self._refused, _nothing, _nothing
        try:
            refused(error)
        except Exception:
            _log.exception("thread %s was not started, and reporting this failed", self.name)
        self._settled.set()


class _Start:
    """A start that is under way, for the thread that watches it."""

    __slots__ = ("ended", "late", "launch")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.ended = threading.Lock()
        """Held until the start has ended."""
        self.ended.acquire()
        self.late = False
        """True if the start was given up."""


class _Starter:
    """The thread that starts others, the launches that wait for it, and the thread that watches it."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was to be started: in a forked child, the starter and the launches are the parent's."""
        self.process = object()
        """A value that differs between a process and its forked children."""
        self._launches: SimpleQueue[Launch] = SimpleQueue()
        self._starts: SimpleQueue[_Start] = SimpleQueue()
        """The starts that have begun, for the thread that watches them."""
        self._runs = False
        """True while a starter serves the launches."""
        self._watched = False
        """True once the starts are watched."""
        self._due = float("-inf")
        self._stuck = 0
        """Number of starters whose start was given up and has not returned."""
        self._lock = threading.Lock()
        """Held to begin and to end a starter; no caller takes it while a starter serves."""

    def request(self, launch: Launch) -> None:
        """Queue a launch, or refuse it if there is no starter."""
        if self._runs or (error := self._begin()) is None:
            self._launches.put(launch)
        else:
            launch.refuse(error)
            self._refuse_all(error)

    def _refuse_all(self, error: Exception) -> None:
        with suppress(Empty):
            while True:
                self._launches.get_nowait().refuse(error)

    def _begin(self) -> Exception | None:
        """Start a starter, and return the reason if none can be started now.

        The low-level call does not wait until the new thread runs.
        """
        with self._lock:
            if self._runs:
                return None
            if self._stuck >= MAX_STARTERS:
                return RuntimeError(f"can't start new thread: {self._stuck} starts hang")
            if time.monotonic() < self._due:
                return RuntimeError("can't start new thread")
            try:
                _thread.start_new_thread(self._serve, ())
            except (RuntimeError, MemoryError) as error:
                self._due = time.monotonic() + _RETRY_SECONDS
                return error
            self._runs = True
        return None

    def _serve(self) -> None:
        threading.current_thread().name = STARTER_NAME
        while True:
            start = _Start(self._launches.get())
            if self._watched or self._begin_watch():
                self._starts.put(start)
            start.launch.start()
            start.ended.release()
            with self._lock:
                if start.late:
                    self._stuck -= 1
                    if self._runs:
                        threading.current_thread().name = f"{STARTER_NAME} (ended)"
                        return  # another starter has taken over
                    self._runs = True

    def _begin_watch(self) -> bool:
        """Start the thread that watches the starter, and return False if it cannot be started now."""
        try:
            _thread.start_new_thread(self._watch, ())
        except (RuntimeError, MemoryError):
            return False
        self._watched = True
        return True

    def _watch(self) -> None:
        while True:
            start = self._starts.get()
            if start.ended.acquire(timeout=LONGEST_START):
                continue
            with self._lock:
                if start.ended.acquire(blocking=False):
                    continue
                start.late = True
                self._stuck += 1
                self._runs = False
            threading.current_thread().name = f"{STARTER_NAME}-watch"
            _log.error(
                "the start of thread %s takes longer than %g s and is given up", start.launch.name, LONGEST_START
            )
            start.launch.give_up(TimeoutError(f"its start takes longer than {LONGEST_START:g} s"))
            if (error := self._begin()) is not None:
                self._refuse_all(error)


class Seats:
    """Threads of one owner, each on a numbered seat.

    A thread takes its seat when it is requested, without a lock. Any thread may call all methods.
    """

    def __init__(self) -> None:
        # Single operations on these dictionaries are atomic: the first of two threads that want a seat gets it.
        self.taken: dict[int, Launch] = {}
        """The launch of each seat that is taken, for reading."""
        self.starting: dict[int, None] = {}
        """Seats whose threads were requested and have not called :meth:`begun`, for reading."""
        self._launched: dict[Launch, None] = {}

    def take(self, limit: int, launch: Callable[[int], Launch]) -> None:
        """Request a thread on a free seat with a number below ``limit``; do nothing if there is none.

        Args:
            limit: number of seats.
            launch: returns the launch for a seat. Its target calls :meth:`begun` first, and its ``refused`` calls
                :meth:`leave`.
        """
        for seat in range(limit):
            if seat in self.taken:
                continue
            requested = launch(seat)
            if self.taken.setdefault(seat, requested) is requested:
                self.starting[seat] = None
                self.begin(requested)
                return

    def begin(self, launch: Launch) -> None:
        """Request a thread that has no seat."""
        for known in list(self._launched):
            if not known.is_alive():
                self._launched.pop(known, None)
        self._launched[launch] = None
        launch.begin()

    def begun(self, seat: int) -> None:
        """Record that the thread of ``seat`` runs."""
        self.starting.pop(seat, None)

    def leave(self, seat: int) -> Launch | None:
        """Free a seat, and return the launch that had it."""
        self.starting.pop(seat, None)
        return self.taken.pop(seat, None)

    def take_again(self, seat: int, launch: Launch | None) -> bool:
        """Take a seat that :meth:`leave` has freed, and return False if another thread has it."""
        return launch is not None and self.taken.setdefault(seat, launch) is launch

    def cancel(self) -> None:
        """Give up the threads whose start has not begun."""
        for launch in list(self._launched):
            launch.cancel()

    def cancel_seats(self, keep: int = 0) -> None:
        """Give up the threads with a seat whose start has not begun.

        Args:
            keep: number of threads not to give up, those requested first; default 0.
        """
        for seat in list(self.starting)[keep:]:
            if (launch := self.taken.get(seat)) is not None:
                launch.cancel()

    def running(self) -> list[Launch]:
        """Return the threads that run or are about to start."""
        return [launch for launch in list(self._launched) if launch.is_alive()]


def _nothing(*_: object) -> None:
    """Do nothing."""


_starter = _Starter()
os.register_at_fork(after_in_child=_starter.begin_anew)

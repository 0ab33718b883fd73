"""The circuit breaker: a medium that keeps failing is left alone for a while, then probed, then used again."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence

from tiering.block_store import BlockIO, BlockStore, Outcome, Place, StoreProbe
from tiering.errors import CorruptBlockError, OutOfSpaceError, OverdueError, StoreError
from tiering.options import BreakerOptions
from tiering.secondary.layers.base import StoreLayer

_log = logging.getLogger("kv_tiering.breaker")


class BreakerState(enum.IntEnum):
    """What a breaker lets through.  The numbers are those of the ``breaker_state`` gauge."""

    CLOSED = 0
    """Everything."""
    HALF_OPEN = 1
    """One probe is on its way."""
    OPEN = 2
    """Nothing, until a probe is due."""


class BreakerOpenError(StoreError):
    """The breaker is open: the medium was not asked.  Not temporary: a retry within the job would only wait."""


class Breaker:
    """Opens after ``options.failures`` failed attempts in a row, or when :meth:`trip` is called.

    ``options.probe_after`` seconds later one attempt is let through.  If it succeeds the breaker closes; if it fails, the next is let
    through after twice the time, at most ``options.probe_max``.  A probe that never reports is given up after the same time, and a
    success that comes late makes a probe due at once, so that a breaker never stays open for ever.

    Threads of the I/O side call :meth:`admit`, :meth:`record_success` and :meth:`record_failure`.  :attr:`state` and :meth:`allows`
    may be read by the scheduler's thread; they take no lock.
    """

    def __init__(self, options: BreakerOptions, *, name: str, clock: Callable[[], float]) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it has opened from closed."""
        self._options = options
        self._name = name
        self._clock = clock
        self._failures = 0
        self._interval = options.probe_after
        self._probe_at = 0.0
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Whether an attempt that starts now may be let through: closed, or a probe is due.  Changes nothing."""
        return self.state is BreakerState.CLOSED or self._clock() >= self._probe_at

    def admit(self) -> bool:
        """Whether this attempt is let through.  Each True while not closed is a probe, whose end must be recorded."""
        with self._lock:
            if self.state is BreakerState.CLOSED:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self.state = BreakerState.HALF_OPEN
            self._probe_at = now + self._interval
            return True

    def record_success(self) -> None:
        """An attempt reached the medium and got an answer."""
        if self.state is BreakerState.CLOSED and not self._failures:
            return
        with self._lock:
            self._failures = 0
            if self.state is BreakerState.HALF_OPEN:
                self.state = BreakerState.CLOSED
                self._interval = self._options.probe_after
                _log.warning("tier %s: the medium answers again, back in service", self._name)
            elif self.state is BreakerState.OPEN:
                self._probe_at = min(self._probe_at, self._clock())

    def record_failure(self, reason: object) -> None:
        """An attempt failed for a reason that lies with the medium."""
        with self._lock:
            if self.state is BreakerState.HALF_OPEN:
                self._interval = min(self._interval * 2, self._options.probe_max)
                self._open(reason)
            elif self.state is BreakerState.CLOSED:
                self._failures += 1
                if self._failures >= self._options.failures:
                    self._open(reason)

    def trip(self, reason: str) -> None:
        """Open now, for a reason that the caller knows."""
        with self._lock:
            if self.state is not BreakerState.OPEN:
                self._open(reason)

    def _open(self, reason: object) -> None:
        if self.state is BreakerState.CLOSED:
            self.opened += 1
            _log.warning("tier %s: out of service, next try in %.1f s: %s", self._name, self._interval, reason)
        else:
            _log.info("tier %s: still out of service, next try in %.1f s: %s", self._name, self._interval, reason)
        self._failures = 0
        self._probe_at = self._clock() + self._interval
        self.state = BreakerState.OPEN


def is_medium_failure(outcome: Outcome) -> bool:
    """Whether an outcome speaks against the medium.  Absent, corrupt and full are answers; overdue blocks were never asked."""
    return isinstance(outcome, StoreError) and not isinstance(
        outcome, (CorruptBlockError, OutOfSpaceError, OverdueError, BreakerOpenError)
    )


class BreakerLayer(StoreLayer):
    """Tells a breaker how attempts ended, and asks it before each.

    A batch counts as one attempt: as a success if the medium answered for any of its blocks, as a failure if it failed all that it was
    asked for, as neither if it was asked for none.
    """

    def __init__(self, inner: BlockStore, breaker: Breaker) -> None:
        super().__init__(inner)
        self.breaker = breaker

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._guard(self.inner.put, blocks)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._guard(self.inner.get, blocks)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        if not self.breaker.admit():
            return StoreProbe((None,) * len(places))
        try:
            answer = self.inner.probe(places)
        except BaseException as error:
            self.breaker.record_failure(error)
            raise
        if all(held is None for held in answer.held):
            self.breaker.record_failure("a probe could not be answered")
        else:
            self.breaker.record_success()
        return answer

    def _guard(self, attempt: Callable[[Sequence[BlockIO]], list[Outcome]], blocks: Sequence[BlockIO]) -> list[Outcome]:
        if not self.breaker.admit():
            return [BreakerOpenError("the tier is out of service") for _ in blocks]
        try:
            outcomes = attempt(blocks)
        except BaseException as error:
            self.breaker.record_failure(error)
            raise
        failure: StoreError | None = None
        for outcome in outcomes:
            if is_medium_failure(outcome):
                failure = failure or outcome  # type: ignore[assignment]
            elif not isinstance(outcome, OverdueError):
                self.breaker.record_success()
                return outcomes
        if failure is not None:
            self.breaker.record_failure(failure)
        return outcomes

"""The circuit breakers of a tier: a medium that keeps failing is left alone for a while, then probed, then used again.

Reads and writes have a breaker each (:class:`Breakers`): a medium that refuses writes goes on serving what it holds.
An error that the device reports for one place counts towards an outage only together with errors at other places,
without a success in between.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiering.block_store import BlockIO, BlockStore, Outcome, Place, StoreProbe
from tiering.errors import CorruptBlockError, DeviceError, OverdueError, PlaceLostError, StoreError, WritesRefusedError
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.io.layers.layer import StoreLayer
from tiering.secondary.io.messages import IoKind
from tiering.secondary.options import BreakerOptions

_log = logging.getLogger("kv_tiering.breaker")

LOG_PERIOD = 60.0
"""Seconds between two log lines about outages of one breaker, once it has opened again soon after it had closed."""

_SHORTEST_SHARE = 0.75
"""A wait is at least this share of its nominal length: the breakers of many engines must not probe one medium in step."""


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


def _jitter() -> float:
    return random.uniform(_SHORTEST_SHARE, 1.0)


class Breaker:
    """Opens after ``options.failures`` failed attempts in a row, or when :meth:`trip` is called.

    ``options.probe_after`` seconds later one attempt is let through.  If it succeeds the breaker closes; if it fails,
    the next is let through after twice the time, at most ``options.probe_max``.  A probe that never reports is given up
    after the same time, and a success that comes late makes a probe due at once, so that a breaker never stays open for
    ever.  A breaker that opens again before it has been closed for ``options.probe_max`` seconds goes on doubling.

    ``what`` says in logs what is out of service.  ``jitter``: factor of each wait, drawn anew (default: from 0.75 to
    1).

    Threads of the I/O side call :meth:`admit`, :meth:`record_success` and :meth:`record_failure`.  :attr:`state` and
    :meth:`allows` may be read by the scheduler's thread; they take no lock.
    """

    def __init__(
        self,
        options: BreakerOptions,
        *,
        name: str,
        clock: Callable[[], float],
        what: str = "out of service",
        jitter: Callable[[], float] = _jitter,
    ) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it has opened from closed."""
        self.failed_blocks: tuple[tuple[bytes, Place], ...] = ()
        """Keys and places of the attempts that made it open, as far as they are known: a probe should ask for these."""
        self._options = options
        self._name = name
        self._clock = clock
        self.what = what
        """What the tier is while this is open, for logs and errors."""
        self._jitter = jitter
        self._failures = 0
        self._suspects: dict[Place, bytes] = {}
        self._interval = 0.0
        """The nominal length of the last wait; 0 after a long healthy time."""
        self._closed_at = clock()
        self._probe_at = 0.0
        self._lines = RateLimit(LOG_PERIOD, clock)
        self._announced = False
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
            self._suspects.clear()
            if self.state is BreakerState.HALF_OPEN:
                self.state = BreakerState.CLOSED
                self._closed_at = self._clock()
                self.failed_blocks = ()
                if self._announced:
                    _log.warning("tier %s: the medium answers again, no longer %s", self._name, self.what)
            elif self.state is BreakerState.OPEN:
                self._probe_at = min(self._probe_at, self._clock())

    def record_failure(self, reason: object, block: BlockIO | None = None) -> None:
        """An attempt failed for a reason that lies with the medium.

        ``block``: one that was asked for (default: not known).  An error that the device reports for the place of a
        block (:class:`DeviceError`) does not count if it is known of that place already.
        """
        with self._lock:
            if self.state is BreakerState.HALF_OPEN:
                self._interval = min(self._interval * 2, self._options.probe_max)
                self._open(reason)
            elif self.state is BreakerState.CLOSED:
                if block is not None:
                    if isinstance(reason, DeviceError) and block.place in self._suspects:
                        return
                    self._suspects[block.place] = block.key
                self._failures += 1
                if self._failures >= self._options.failures:
                    self._begin(reason)

    def trip(self, reason: object) -> None:
        """Open now, for a reason that the caller knows."""
        with self._lock:
            if self.state is BreakerState.CLOSED:
                self._begin(reason)
            elif self.state is BreakerState.HALF_OPEN:
                self._interval = min(self._interval * 2, self._options.probe_max)
                self._open(reason)

    def _begin(self, reason: object) -> None:
        """Open from closed.  The waits go on doubling unless the breaker has been closed for long."""
        options = self._options
        if self._clock() - self._closed_at >= options.probe_max:
            self._interval = 0.0
        self._interval = min(self._interval * 2 or options.probe_after, options.probe_max)
        self.opened += 1
        self.failed_blocks = tuple((key, place) for place, key in self._suspects.items())
        self._suspects.clear()
        self._open(reason)
        times = self._lines.admit()
        self._announced = bool(times)
        if times:
            often = f" ({times} outages since the last such line)" if times > 1 else ""
            _log.warning(
                "tier %s: %s, next try within %.1f s%s: %s", self._name, self.what, self._interval, often, reason
            )

    def _open(self, reason: object) -> None:
        if self.state is BreakerState.HALF_OPEN:
            _log.debug("tier %s: still %s, next try within %.1f s: %s", self._name, self.what, self._interval, reason)
        self._failures = 0
        self._probe_at = self._clock() + self._interval * self._jitter()
        self.state = BreakerState.OPEN


@dataclass(frozen=True, slots=True)
class Breakers:
    """The breakers of one tier.

    A medium that cannot be read is out of service altogether; one that cannot be written serves what it holds.
    """

    reads: Breaker
    writes: Breaker

    @classmethod
    def build(
        cls, options: BreakerOptions, *, name: str, clock: Callable[[], float], jitter: Callable[[], float] = _jitter
    ) -> Breakers:
        """Both breakers of the tier ``name``, closed."""
        return cls(
            Breaker(options, name=name, clock=clock, jitter=jitter),
            Breaker(options, name=name, clock=clock, jitter=jitter, what="taking no stores"),
        )

    def allows(self, kind: IoKind) -> bool:
        """Whether a job of ``kind`` that starts now may be let through.  Changes nothing."""
        return self.reads.allows() and (kind is IoKind.LOAD or self.writes.allows())

    @property
    def state(self) -> BreakerState:
        """The worse of the two states."""
        return max(self.reads.state, self.writes.state)

    @property
    def opened(self) -> int:
        """How often one of them has opened from closed."""
        return self.reads.opened + self.writes.opened

    def trip(self, reason: str) -> None:
        """Open both now, for a reason that the caller knows."""
        self.reads.trip(reason)
        self.writes.trip(reason)


def is_medium_failure(outcome: Outcome) -> bool:
    """Whether an outcome speaks against the medium.  Absent and corrupt are answers; overdue blocks were never asked."""
    return isinstance(outcome, StoreError) and not isinstance(
        outcome, (CorruptBlockError, OverdueError, PlaceLostError, BreakerOpenError)
    )


class BreakerLayer(StoreLayer):
    """Tells the breakers how attempts ended, and asks them before each.

    A batch counts as one attempt: as a success if the medium answered for any of its blocks, as a failure if it failed
    all that it was asked for, as neither if it was asked for none.  A medium of our own that refuses writes (full,
    read-only) gets none for a while, at once: each further one would cost a block that was evicted for it.
    """

    def __init__(self, inner: BlockStore, breakers: Breakers) -> None:
        super().__init__(inner)
        self.breakers = breakers

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._guard(self.breakers.writes, self.inner.put, blocks)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._guard(self.breakers.reads, self.inner.get, blocks)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        breaker = self.breakers.reads
        if not breaker.admit():
            return StoreProbe((None,) * len(places))
        try:
            answer = self.inner.probe(places)
        except BaseException as error:
            breaker.record_failure(error)
            raise
        if all(held is None for held in answer.held):
            breaker.record_failure("a probe could not be answered")
        else:
            breaker.record_success()
        return answer

    def _guard(
        self, breaker: Breaker, attempt: Callable[[Sequence[BlockIO]], list[Outcome]], blocks: Sequence[BlockIO]
    ) -> list[Outcome]:
        if not breaker.admit():
            return [BreakerOpenError(f"the tier is {breaker.what}") for _ in blocks]
        try:
            outcomes = attempt(blocks)
        except BaseException as error:
            breaker.record_failure(error)
            raise
        failed: tuple[StoreError, BlockIO] | None = None
        for block, outcome in zip(blocks, outcomes, strict=False):
            if isinstance(outcome, StoreError) and is_medium_failure(outcome):
                failed = failed or (outcome, block)
            elif not isinstance(outcome, OverdueError):
                breaker.record_success()
                return outcomes
        if failed is not None:
            if isinstance(failed[0], WritesRefusedError) and isinstance(failed[1].place, int):
                breaker.trip(failed[0])
            else:
                breaker.record_failure(*failed)
        return outcomes

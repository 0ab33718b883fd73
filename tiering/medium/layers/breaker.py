"""Circuit breakers of a tier: a medium that keeps failing gets no attempts for a while, then probes.

Reads and writes have one breaker each (:class:`Breakers`): a medium that refuses writes still serves its blocks. A
device error at one place counts towards an outage only together with errors at other places, without a success in
between.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiering.errors import CorruptBlockError, DeviceError, OverdueError, PlaceLostError, StoreError, WritesRefusedError
from tiering.medium.block_store import BlockIO, BlockStore, Outcome, Place, StoreProbe
from tiering.medium.layers.layer import Attempt, StoreLayer
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.options import BreakerOptions

_log = logging.getLogger("kv_tiering.breaker")

LOG_PERIOD = 60.0
"""Seconds between two log lines about outages of a breaker that opens again soon after it closed."""

_SHORTEST_SHARE = 0.75
"""Shortest wait as a share of its nominal length.

Jitter keeps the breakers of many engines from probing one medium at the same times.
"""


class BreakerState(enum.IntEnum):
    """State of a breaker; the numbers are those of the ``breaker_state`` gauge."""

    CLOSED = 0
    """All attempts are let through."""
    HALF_OPEN = 1
    """One probe is under way."""
    OPEN = 2
    """No attempt is let through until a probe is due."""


class BreakerOpenError(StoreError):
    """The breaker is open, and the medium was not accessed.

    The error is not temporary, because a retry within the job would only wait.
    """


def _jitter() -> float:
    return random.uniform(_SHORTEST_SHARE, 1.0)


class Breaker:
    """Circuit breaker that opens after failed attempts in a row, or when :meth:`trip` is called.

    ``options.failures`` failed attempts open it. ``options.probe_after`` seconds later, one attempt is let through as a
    probe. A probe that succeeds closes the breaker. After a probe that fails, the next wait is twice as long, at most
    ``options.probe_max``.

    A probe that never reports expires after the same time, and a late success makes a probe due at once. A breaker
    therefore never stays open for ever. A breaker that opens again less than ``options.probe_max`` seconds after it
    closed goes on doubling its waits.

    I/O threads call :meth:`admit`, :meth:`record_success` and :meth:`record_failure`. The scheduler's thread may read
    :attr:`state` and call :meth:`allows`, which take no lock.

    Args:
        options: number of failures and lengths of the waits.
        name: name of the tier.
        clock: function that returns monotonic seconds.
        what: state of the tier while the breaker is open, for logs and errors; default "out of service".
        jitter: function that returns the factor of each wait; default: random, from 0.75 to 1.
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
        """Number of times that the breaker opened from closed."""
        self.failed_blocks: tuple[tuple[bytes, Place], ...] = ()
        """Keys and places of the attempts that opened the breaker, where known; a probe should use these."""
        self._options = options
        self._name = name
        self._clock = clock
        self.what = what
        self._jitter = jitter
        self._failures = 0
        self._suspects: dict[Place, bytes] = {}
        self._interval = 0.0
        """Nominal length of the last wait in seconds; 0 after a long healthy time."""
        self._closed_at = clock()
        self._probe_at = 0.0
        self._lines = RateLimit(LOG_PERIOD, clock)
        self._announced = False
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Return True if an attempt may start now: the breaker is closed, or a probe is due; changes nothing."""
        return self.state is BreakerState.CLOSED or self._clock() >= self._probe_at

    def admit(self) -> bool:
        """Return True if this attempt may start.

        Each True while the breaker is not closed starts a probe, whose end must be recorded.
        """
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
        """Record an attempt that reached the medium and got an answer."""
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
        """Record an attempt that failed because of the medium.

        Args:
            reason: the error.
            block: one of the blocks of the attempt; default: not known. A :class:`DeviceError` at the place of this
                block counts only once per place.
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
        """Open the breaker now, for a reason other than failed attempts."""
        with self._lock:
            if self.state is BreakerState.CLOSED:
                self._begin(reason)
            elif self.state is BreakerState.HALF_OPEN:
                self._interval = min(self._interval * 2, self._options.probe_max)
                self._open(reason)

    def _begin(self, reason: object) -> None:
        """Open from closed; the waits go on doubling unless the breaker has been closed for long."""
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
    """Circuit breakers of one tier.

    A medium that cannot be read is out of service. A medium that cannot be written serves its blocks.
    """

    reads: Breaker
    writes: Breaker

    @classmethod
    def build(
        cls, options: BreakerOptions, *, name: str, clock: Callable[[], float], jitter: Callable[[], float] = _jitter
    ) -> Breakers:
        """Return two closed breakers for the tier ``name``."""
        return cls(
            Breaker(options, name=name, clock=clock, jitter=jitter),
            Breaker(options, name=name, clock=clock, jitter=jitter, what="taking no stores"),
        )

    def allows(self, *, load: bool) -> bool:
        """Return True if a load, or else a store, may start now; changes nothing."""
        return self.reads.allows() and (load or self.writes.allows())

    @property
    def state(self) -> BreakerState:
        """The worse of the two states."""
        return max(self.reads.state, self.writes.state)

    @property
    def opened(self) -> int:
        """Number of times that one of the breakers opened from closed."""
        return self.reads.opened + self.writes.opened

    def trip(self, reason: str) -> None:
        """Open both breakers now, for a reason other than failed attempts."""
        self.reads.trip(reason)
        self.writes.trip(reason)


def is_medium_failure(outcome: Outcome) -> bool:
    """Return True if an outcome counts as a failure of the medium.

    Absent and corrupt blocks are answers of the medium, and overdue blocks were never requested.
    """
    return isinstance(outcome, StoreError) and not isinstance(
        outcome, (CorruptBlockError, OverdueError, PlaceLostError, BreakerOpenError)
    )


class BreakerLayer(StoreLayer):
    """Records in the breakers how attempts ended, and lets through the attempts that they allow.

    A batch counts as one attempt. It is a success if the medium answered for any of its blocks, and a failure if all
    requested blocks failed. It is neither if no block was requested.

    A medium with slots that refuses writes (full, read-only) trips the breaker for writes at once. Each further write
    would cost a block that was evicted for it.
    """

    def __init__(self, inner: BlockStore, breakers: Breakers) -> None:
        super().__init__(inner)
        self.breakers = breakers

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

    def around(self, attempt: Attempt, blocks: Sequence[BlockIO], *, load: bool) -> list[Outcome]:
        breaker = self.breakers.reads if load else self.breakers.writes
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

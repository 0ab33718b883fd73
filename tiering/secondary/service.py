"""Taking a tier into service: at start, after an outage, and in a new epoch after a reset; in the background, for ever."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from tiering.block_store import BlockStore
from tiering.errors import TieringError
from tiering.options import BreakerOptions
from tiering.secondary.io_side import IoSide
from tiering.secondary.medium import Entered, Medium
from tiering.secondary.messages import IoTask

logger = logging.getLogger("kv_tiering.tier")


class Backoff:
    """When to try again: after ``probe_after`` seconds, doubling to ``probe_max``, with jitter."""

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        self.failures = 0
        self.due = 0.0

    def failed(self, now: float) -> None:
        """Another failure, at ``now``."""
        delay = min(self._options.probe_after * 2 ** min(self.failures, 32), self._options.probe_max)
        self.failures += 1
        self.due = now + delay * random.uniform(0.8, 1.2)

    def succeeded(self) -> None:
        """Start over."""
        self.failures = 0


class TierService:
    """Opens the medium and enters an epoch; owned by the scheduler's thread, works on the I/O side.

    ``on_entered`` is called on the scheduler's thread each time an epoch has been entered.  A failure is logged once per outage.
    """

    def __init__(
        self,
        name: str,
        medium: Medium,
        io: IoSide,
        options: BreakerOptions,
        clock: Callable[[], float],
        on_entered: Callable[[Entered], None],
    ) -> None:
        self._name = name
        self._medium = medium
        self._io = io
        self._clock = clock
        self._on_entered = on_entered
        self._backoff = Backoff(options)
        self._new_epoch: bytes | None = None
        self._stopped = False
        self.attempting = False
        self.in_service = False

    def start(self) -> None:
        """Begin an attempt, unless one is running or nothing is to be done."""
        if self.attempting or self.in_service or self._stopped:
            return
        self.attempting = True
        new_epoch = self._new_epoch
        self._io.run(IoTask("open", lambda: self._medium.enter(new_epoch), self._ended, background=True))

    def renew(self, new_epoch: bytes) -> None:
        """Leave service until ``new_epoch`` is durable on the medium."""
        self.in_service = False
        # An epoch that is not entered yet is as new as this one: nothing was stored since.
        self._new_epoch = self._new_epoch or new_epoch
        self.start()

    def tick(self, now: float) -> None:
        """Try again when it is time."""
        if not self.in_service and not self.attempting and self._backoff.failures and now >= self._backoff.due:
            self.start()

    def stop(self) -> None:
        """Leave service for good."""
        self._stopped = True
        self.in_service = False

    def _ended(self, entered: Entered | None, error: BaseException | None) -> None:
        self.attempting = False
        if self._stopped:
            return
        if entered is None:
            self._failed(error)
        elif self._new_epoch is not None and entered.namespace.epoch != self._new_epoch:
            self.start()
        else:
            if self._backoff.failures:
                logger.info("tier %s: in service again after %d failed attempts", self._name, self._backoff.failures)
            self._backoff.succeeded()
            self._new_epoch = None
            self.in_service = True
            self._on_entered(entered)

    def _failed(self, error: BaseException | None) -> None:
        if not self._backoff.failures:
            logger.error(
                "tier %s: not in service: %s; the engine runs without it, and it comes back by itself when this is put right",
                self._name,
                error,
                exc_info=None if isinstance(error, TieringError) else error,
            )
        self._backoff.failed(self._clock())


class Reclaimer:
    """Deletes the blocks of earlier epochs in the background, one prefix after another, until it succeeds."""

    def __init__(self, name: str, store: BlockStore, io: IoSide, options: BreakerOptions, clock: Callable[[], float]) -> None:
        self._name = name
        self._store = store
        self._io = io
        self._clock = clock
        self._backoff = Backoff(options)
        self._prefixes: list[str] = []
        self._running = False

    def add(self, prefix: str) -> None:
        """Delete what is under ``prefix``."""
        self._prefixes.append(prefix)
        self._start()

    def tick(self, now: float) -> None:
        """Try again when it is time."""
        if self._prefixes and not self._running and now >= self._backoff.due:
            self._start()

    def _start(self) -> None:
        if self._running:
            return
        self._running = True
        prefix = self._prefixes[0]
        self._io.run(IoTask("reclaim", lambda: self._store.reclaim(prefix), self._ended, background=True))

    def _ended(self, blocks: int | None, error: BaseException | None) -> None:
        self._running = False
        if blocks is None:
            if not self._backoff.failures:
                logger.warning("tier %s: blocks of an earlier epoch could not be deleted yet: %s", self._name, error)
            self._backoff.failed(self._clock())
            return
        self._backoff.succeeded()
        logger.info("tier %s: %d blocks of an earlier epoch were deleted", self._name, blocks)
        self._prefixes.pop(0)
        if self._prefixes:
            self._start()

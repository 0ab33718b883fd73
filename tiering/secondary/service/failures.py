"""What became of the blocks of a tier that did not arrive: counted, and said as often as a person wants to read it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tiering.block_store import Outcome
from tiering.errors import CorruptBlockError, DeviceError, OverdueError, StoreError
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.io.layers.breaker import BreakerOpenError
from tiering.secondary.io.messages import IoKind

logger = logging.getLogger("kv_tiering.tier")

_LOG_PERIOD = 30.0


class FailureLog:
    """Says why blocks failed.  The I/O side itself speaks of corrupt blocks, and the breaker of outages."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._lines = RateLimit(_LOG_PERIOD, clock)
        self.corrupt_blocks = 0
        """Blocks that came back other than they were stored."""
        self.device_errors = 0
        """Blocks that could not be moved because the device reported an error at their place."""

    def note(self, kind: IoKind, outcomes: Sequence[Outcome]) -> None:
        """A job ended with ``outcomes``, not all of them done."""
        errors = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
        self.corrupt_blocks += sum(isinstance(error, CorruptBlockError) for error in errors)
        self.device_errors += sum(isinstance(error, DeviceError) for error in errors)
        others = [
            error for error in errors if not isinstance(error, (CorruptBlockError, OverdueError, BreakerOpenError))
        ]
        if others and (events := self._lines.admit(len(others))):
            what = "not stored" if kind is IoKind.STORE else "not loaded"
            logger.warning(
                "tier %s: %d block(s) were %s, the last one because: %s", self._name, events, what, others[-1]
            )

    def not_deleted(self, result: None, error: BaseException | None) -> None:
        """A deletion of corrupt blocks ended; ``error`` if it failed."""
        if error is not None and self._lines.admit():
            logger.warning(
                "tier %s: corrupt blocks could not be deleted, and will be found again: %s", self._name, error
            )

"""Counters and rate-limited log of blocks that could not be stored or loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiering.errors import CorruptBlockError, DeviceError, OverdueError, StoreError
from tiering.medium.layers.breaker import BreakerOpenError
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.contract import TransferJob
from tiering.secondary.tier_stats import TierStats

logger = logging.getLogger("kv_tiering.tier")

_LOG_PERIOD = 30.0


class FailureLog:
    """Counts failed blocks and logs the reasons.

    The I/O side itself logs corrupt blocks, and the breaker logs outages.
    """

    def __init__(self, name: str, stats: TierStats, clock: Callable[[], float]) -> None:
        self._name = name
        self._stats = stats
        self._lines = RateLimit(_LOG_PERIOD, clock)

    def note(self, job: TransferJob) -> None:
        """Record that ``job`` has ended, and not all of its blocks were moved."""
        errors = [outcome for outcome in job.outcomes if isinstance(outcome, StoreError)]
        if not errors:
            return
        self._stats.corrupt_blocks += sum(isinstance(error, CorruptBlockError) for error in errors)
        self._stats.device_errors += sum(isinstance(error, DeviceError) for error in errors)
        others = [
            error for error in errors if not isinstance(error, (CorruptBlockError, OverdueError, BreakerOpenError))
        ]
        if others and (events := self._lines.admit(len(others))):
            what = "not loaded" if job.is_promotion else "not stored"
            logger.warning(
                "tier %s: %d block(s) were %s, the last one (of job %d) because: %s",
                self._name,
                events,
                what,
                job.job_id,
                others[-1],
            )

"""The scheduler half's reports for metrics: the growth of its counters since the last report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from tiering.connector.metrics import LABELLED
from tiering.connector.stats import RECORDS, Increments, OffloadingConnectorStats

STATS_INTERVAL = 1.0
"""Time between two reports of the tiers' counters while requests run, in seconds."""

Stats = TypeVar("Stats", bound=OffloadingConnectorStats)


class TierReports(Generic[Stats]):
    """The reports of one scheduler half, for any engine.

    Args:
        make: class of the reports, for example :class:`~tiering.connector.stats.OffloadingConnectorStats`.
        clock: returns monotonic seconds.
    """

    def __init__(self, make: type[Stats], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self.next_at = 0.0
        """Time of the next report while requests or jobs run, in monotonic seconds."""
        self._labelled = {record: Increments() for record in LABELLED}
        self._records = Increments()

    def is_due(self, busy: bool) -> bool:
        """Return True every :data:`STATS_INTERVAL` seconds, and whenever the engine is idle.

        Args:
            busy: True while requests or jobs run.
        """
        now = self._clock()
        if busy and now < self.next_at:
            return False
        self.next_at = now + STATS_INTERVAL
        return True

    def take(self, current: Mapping[str, Any]) -> Stats | None:
        """Return the growth of the counters since the last call; None without any.

        Args:
            current: statistics of the scheduler half since the start.
        """
        parts = {record: before.take(current.get(record, {})) for record, before in self._labelled.items()}
        parts |= self._records.take({name: current[name] for name in RECORDS if name in current})
        stats = self._make({name: part for name, part in parts.items() if part})
        return None if stats.is_empty() else stats

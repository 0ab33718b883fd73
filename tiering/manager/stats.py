"""What the tiering manager counts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

MANAGER_GAUGES = frozenset(
    ("jobs_in_flight", "rows", "rows_free", "rows_evictable", "rows_reserved", "rows_quarantined")
)
"""The fields of :class:`ManagerStats` that tell how things are; all others count what has happened since the start."""


@dataclass(slots=True)
class ManagerStats:
    """Counters since the start, and gauges of the primary tier (rows)."""

    stores_without_room: int = 0
    promotions_without_room: int = 0
    promotions_overdue: int = 0
    promotions_dropped: int = 0
    promotions_adopted: int = 0
    reservations_expired: int = 0
    ignored_completions: int = 0
    misreported_jobs: int = 0
    tiers_out_of_service: int = 0
    resets: int = 0
    evicted_blocks: int = 0
    jobs_in_flight: int = 0
    rows: int = 0
    rows_free: int = 0
    rows_evictable: int = 0
    rows_reserved: int = 0
    rows_quarantined: int = 0

    def as_dict(self) -> dict[str, int]:
        """A plain copy."""
        return dataclasses.asdict(self)

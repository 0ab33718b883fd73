"""Counters and gauges of the tiering manager."""

from __future__ import annotations

from dataclasses import dataclass

MANAGER_GAUGES = frozenset(
    ("jobs_in_flight", "blocks_queued", "rows", "rows_free", "rows_evictable", "rows_reserved", "rows_quarantined")
)
"""Fields of :class:`ManagerStats` that are gauges; all others are counters since the start."""


@dataclass(slots=True)
class ManagerStats:
    """Counters since the start, and gauges of the primary tier in rows."""

    stores_without_room: int = 0
    """Calls of ``prepare_store`` that were refused: rows were in use, or too many waited for a tier."""
    promotions_without_room: int = 0
    """Promotions that were cut short or refused for lack of rows."""
    promotions_waited: int = 0
    """Times that a request waited for rows for its promotion."""
    queued_evicted: int = 0
    """Blocks that left the queue of a tier unstored because their rows were needed, per tier."""
    queued_reset: int = 0
    """Blocks that left the queue of a tier unstored because of a reset or a new common epoch, per tier."""
    queued_retired: int = 0
    """Blocks that left the queue of a tier unstored because the tier went out of service or shut down."""
    promotions_overdue: int = 0
    """Blocks whose promotion passed its tier's deadline."""
    promotions_dropped: int = 0
    """Blocks whose promotion was dropped before it was submitted: after a reset, or without a request."""
    promotions_adopted: int = 0
    """Blocks that arrived after their promotion was given up, and were kept."""
    reservations_expired: int = 0
    """Promoted blocks that were not loaded before their reservation expired, per request."""
    ignored_completions: int = 0
    """Completed blocks that the primary table did not know, e.g. after a reset."""
    misreported_jobs: int = 0
    """Job ids that a tier reported and that were not its own."""
    tiers_out_of_service: int = 0
    """Tiers that were taken out of service because they broke their contract."""
    resets: int = 0
    """Calls of ``reset_cache``."""
    new_epochs: int = 0
    """Times that all tiers were emptied because a new common epoch had begun on a shared medium."""
    evicted_blocks: int = 0
    """Blocks that were evicted from the primary tier."""
    jobs_in_flight: int = 0
    """Gauge: jobs that tiers have not reported yet."""
    blocks_queued: int = 0
    """Gauge: readable blocks that wait for the credit of a tier, per tier."""
    rows: int = 0
    """Gauge: all rows of the primary tier."""
    rows_free: int = 0
    """Gauge: rows without a block."""
    rows_evictable: int = 0
    """Gauge: rows with a readable block that is not pinned."""
    rows_reserved: int = 0
    """Gauge: rows of promoted blocks that are reserved for the requests that asked for them."""
    rows_quarantined: int = 0
    """Gauge: rows without a key that a copy or a job still uses."""

    def as_dict(self) -> dict[str, int]:
        """Return all fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

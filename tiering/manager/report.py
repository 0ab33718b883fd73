"""The statistics that a manager reports: its own, and those of all tiers."""

from __future__ import annotations

from typing import Any

from tiering.advisor.advisor import SizeAdvisor
from tiering.api.keys import PRIMARY_TIER
from tiering.manager.jobs import TierJobs
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.reservations import Reservations
from tiering.manager.tiers import SecondaryTiers
from tiering.primary.manager import CPUPrimaryTierOffloadingManager


def report(
    stats: ManagerStats,
    primary: CPUPrimaryTierOffloadingManager,
    tiers: SecondaryTiers,
    jobs: TierJobs,
    reservations: Reservations,
    advisor: SizeAdvisor | None,
) -> dict[str, Any]:
    """Return the fields of the manager, of the primary tier and of each secondary tier.

    Args:
        stats: the manager's counters; its gauges are set.
        primary: the primary tier.
        tiers: the secondary tiers.
        jobs: their jobs.
        reservations: the reservations of promoted blocks.
        advisor: adds its estimates to the fields of the tiers; None: there is none.
    """
    rows = primary.count_rows()
    stats.ignored_completions = primary.ignored_completions
    stats.jobs_in_flight = len(jobs)
    stats.blocks_queued = sum([len(state.queue) for state in tiers.states])
    stats.rows, stats.rows_free, stats.rows_evictable = rows.rows, rows.free, rows.evictable
    stats.rows_unprepared = 0 if primary.is_prepared else rows.rows
    stats.rows_reserved, stats.rows_quarantined = reservations.rows, rows.quarantined
    of_primary, of_tiers = _primary_fields(primary, stats), tiers.stats()
    if advisor is not None:
        of_primary |= advisor.estimates(PRIMARY_TIER)
        for name, fields in of_tiers.items():
            fields |= advisor.estimates(name)
    return {"manager": stats.as_dict(), "primary": of_primary, "tiers": of_tiers}


def _primary_fields(primary: CPUPrimaryTierOffloadingManager, stats: ManagerStats) -> dict[str, int | float]:
    """Return the fields of :class:`tiering.secondary.tier_stats.TierStats` that apply to the primary tier."""
    buffer, blocks = primary.get_kv_memoryview(), len(primary.readable)
    return {
        "blocks": blocks,
        "occupancy_bytes": blocks * (buffer.nbytes // primary.num_rows),
        "capacity_bytes": buffer.nbytes,
        "evictions": stats.evicted_blocks,
        "available": 1,
    }

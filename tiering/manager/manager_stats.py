"""Counters and gauges of the tiering manager."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from tiering.api.metric import counter, gauge


@dataclass(slots=True)
class ManagerStats:
    """Counters since the start, and gauges of the primary tier in rows."""

    stores_without_room: int = counter(
        "stores",
        "Stores refused because rows were in use, or half of all rows waited for the fastest tier",
        "Normal in bursts. If it goes on, raise `primary.capacity`, or see `queued_evicted`.",
    )
    promotions_without_room: int = counter(
        "promotions",
        "Promotions cut short because no row was free for them",
        "Hits of slower tiers are lost: raise `primary.capacity` or `promotion_share`.",
    )
    promotions_waited: int = counter(
        "promotions",
        "Promotions that waited because no row was free for them at once",
        "Hits come later than they could: raise `primary.capacity` if the time to the first token matters.",
    )
    queued_evicted: int = counter(
        "blocks",
        "Blocks that left the queue of a tier unstored because their rows were needed",
        "Stores come faster than the tier writes, or it is in trouble: see `stores_evicted` of the tiers.",
    )
    queued_reset: int = counter(
        "blocks",
        "Blocks that left the queue of a tier unstored because of a reset or a new common epoch",
        "Normal after resets.",
    )
    queued_retired: int = counter(
        "blocks",
        "Blocks that left the queue of a tier unstored because the tier went out of service",
        "See `tiers_out_of_service`, and the log.",
    )
    promotions_overdue: int = counter(
        "blocks",
        "Blocks given up because their promotion took too long",
        "See `loads_overdue` of the tiers: a medium is too slow for `load_deadline`.",
    )
    promotions_dropped: int = counter(
        "blocks",
        "Blocks whose promotion was dropped before it began",
        "Normal after resets and for requests that ended early.",
    )
    promotions_adopted: int = counter(
        "blocks",
        "Blocks that arrived after they had been given up, and were kept",
        "A slightly larger `load_deadline` would turn them into hits.",
    )
    reservations_expired: int = counter(
        "blocks",
        "Promoted blocks that no request loaded before their deadline",
        "Requests wait longer than `reservation_deadline` for their turn: the engine is overloaded.",
    )
    ignored_completions: int = counter(
        "blocks", "Completions of blocks that a reset had forgotten", "Normal after a reset only."
    )
    misreported_jobs: int = counter(
        "jobs",
        "Jobs reported by a tier that did not have them",
        "A defect of a tier: see the log, and report it to the tier's author.",
    )
    tiers_out_of_service: int = counter(
        "tiers",
        "Tiers taken out of service because they broke their contract",
        "The tier stays away until a restart. Keep the log, and report the defect.",
    )
    resets: int = counter("resets", "Resets of the cache", "Each empties the tiers; they come from the engine's API.")
    new_epochs: int = counter(
        "epochs",
        "New common epochs for which all tiers were emptied",
        "Somebody ran `kv-tiering epoch new`, or an epoch document was lost.",
    )
    evicted_blocks: int = counter(
        "blocks", "Blocks evicted from the CPU tier", "The same as evictions of the tier cpu."
    )
    blocks_released: int = counter(
        "blocks",
        "Blocks of released sessions that are evicted from the CPU tier first",
        "Compare with `sessions_released`: near 0, the sessions share their blocks, or were evicted before.",
    )
    blocks_retained: int = counter(
        "blocks",
        "Blocks of the CPU tier that a hint retained, or retained for longer",
        "Near 0 although clients send the hint: the blocks were evicted before, or `hints.retain` is used up.",
    )
    blocks_pinned: int = counter(
        "blocks",
        "Blocks of the CPU tier that a hint pinned, or pinned for longer",
        "Near 0 although clients send the hint: `hints.pin` is 0 or used up.",
    )
    blocks_prefetched: int = counter(
        "blocks",
        "Blocks that a hint had promoted into the CPU tier",
        "0 although clients send the hint: `hints.prefetch` is not set, or the CPU tier holds the blocks already.",
    )
    hint_hits: int = counter(
        "blocks",
        "Blocks that requests loaded from the CPU tier while a hint kept them there",
        "Near 0 although `blocks_retained` grows: sessions return later than they say, or not at all.",
    )
    warm_start_engines: int = counter(
        "engines",
        "Engines whose published keys a warm start followed",
        "0 after a start with `warm_start`: nobody published within ten minutes, or another epoch has begun.",
    )
    warm_start_blocks: int = counter(
        "blocks",
        "Blocks that a warm start has loaded into the CPU tier",
        "If few, see `warm_start_missing`, and the words `bytes`, `seconds` and `bandwidth`.",
    )
    inherited_blocks: int = counter(
        "blocks",
        "Blocks that an earlier engine has left in rows of the machine's service",
        "0 after a restart with `machine.keep_rows`: capacity or model changed, or the rows were kept too short.",
    )
    warm_start_missing: int = counter(
        "blocks",
        "Blocks for a warm start that no tier held or could load",
        "Many: the tiers evict what the engines use, or admit less than that.",
    )
    jobs_in_flight: int = gauge(
        "jobs", "Jobs that tiers have not reported yet", "If it grows without end, a medium hangs."
    )
    blocks_queued: int = gauge(
        "blocks",
        "Readable blocks that wait until a tier takes them",
        "If it stays high, stores come faster than a tier writes: see `queued_evicted` for the losses.",
    )
    rows: int = gauge("rows", "Rows of the CPU tier", "Changes with `primary.capacity` only.")
    rows_free: int = gauge("rows", "Rows that hold nothing", "0 is normal once the CPU tier is full.")
    rows_unprepared: int = gauge(
        "rows",
        "Rows whose memory is still being prepared, or could not be",
        "0 with the first request a minute after the start. If it stays, the engine runs without its tiers: the logs "
        "have the reason.",
    )
    rows_evictable: int = gauge(
        "rows",
        "Rows that hold a block and can be evicted now",
        "Near 0 while `rows_free` is 0: stores find no room; raise `primary.capacity`.",
    )
    rows_reserved: int = gauge(
        "rows",
        "Rows with promoted blocks that wait for their requests",
        "At `promotion_share` of rows, promotions are cut short.",
    )
    rows_quarantined: int = gauge(
        "rows",
        "Rows without a key that a transfer still uses",
        "If it stays up, a medium or a copy hangs and keeps memory.",
    )

    def as_dict(self) -> dict[str, int]:
        """Return all fields by name."""
        return dict(zip(self.__slots__, attrgetter(*self.__slots__)(self), strict=True))

"""What the scheduler half counts, and what of it is told as a tier's counters."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.simple.block_pool import CPUBlockPool


@dataclass(slots=True)
class SimpleCounters:
    """What the scheduler has seen since the start: tokens and blocks, and store events that failed.

    ``queried_blocks`` and ``hit_blocks``: of the first full-attention group, of requests that may load, when they were
    matched first.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0
    loaded_blocks: int = 0
    shrunk_blocks: int = 0
    stored_blocks: int = 0
    restored_blocks: int = 0
    dropped_blocks: int = 0
    evicted_blocks: int = 0
    failed_stores: int = 0


def tier_fields(counters: SimpleCounters, pool: CPUBlockPool, block_bytes: int) -> dict[str, int]:
    """The pool as a tier: those fields of :class:`tiering.secondary.stats.TierStats` that have a meaning for it.

    ``block_bytes``: of one block on all workers together.
    """
    return {
        "queries": counters.queried_blocks,
        "hits": counters.hit_blocks,
        "misses": counters.queried_blocks - counters.hit_blocks,
        "evictions": pool.evictions,
        "stores_dropped": counters.dropped_blocks,
        "blocks": len(pool.cached),
        "occupancy_bytes": len(pool.cached) * block_bytes,
        "capacity_bytes": pool.num_blocks * block_bytes,
        "available": 1,
    }

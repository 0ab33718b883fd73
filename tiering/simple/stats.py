"""The counters of the scheduler half, and the part of them that is reported as a tier's counters."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.simple.block_pool import CPUBlockPool


@dataclass(slots=True)
class SimpleCounters:
    """The counters of the scheduler half since the start."""

    queried_tokens: int = 0
    """Tokens beyond the engine's prefix cache, over the first matches of all requests."""
    hit_tokens: int = 0
    """Tokens whose load was ordered."""
    queried_blocks: int = 0
    """Blocks of the first full-attention group in the first matches of requests that may load."""
    hit_blocks: int = 0
    """Those of ``queried_blocks`` that the CPU pool held."""
    loaded_blocks: int = 0
    """Blocks whose load was ordered."""
    shrunk_blocks: int = 0
    """Blocks of a hit that were evicted between the match and the load."""
    stored_blocks: int = 0
    """Blocks whose store was ordered."""
    restored_blocks: int = 0
    """Blocks that were stored again because the CPU pool had evicted them while their request ran."""
    dropped_blocks: int = 0
    """Blocks of finished requests that were reused, or became suspects, before they could be stored."""
    evicted_blocks: int = 0
    """Blocks that the CPU pool has evicted."""
    failed_stores: int = 0
    """Store events that failed on at least one worker."""


def tier_fields(counters: SimpleCounters, pool: CPUBlockPool, block_bytes: int) -> dict[str, int]:
    """Return the fields of :class:`tiering.secondary.stats.TierStats` that apply to the CPU pool.

    Args:
        counters: the counters of the scheduler half.
        pool: the CPU pool.
        block_bytes: bytes of one block, on all workers together.
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

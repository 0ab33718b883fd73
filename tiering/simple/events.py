"""The description of KV-cache groups for KV events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.api.engine import KVCacheGroup
from tiering.simple.cache_config import is_full_attention


@dataclass(frozen=True, slots=True)
class SimpleEventGroup:
    """One KV-cache group in the form of :class:`tiering.offload.event_types.EventGroupConfig`.

    A CPU block of the simple mode is one GPU block.
    """

    group_idx: int
    """Index of the group."""
    offloaded_block_size: int
    """Tokens of a block."""
    hash_block_size_factor: int
    """Number of hashes per block."""
    sliding_window_size_in_blocks: int | None
    """None for full attention, the only kind whose blocks get snapshots; at least 1 otherwise."""
    kv_event_group_spec: tuple[str | None, int | None]
    """Kind of the group, and its sliding window in tokens."""


def event_groups(groups: Sequence[KVCacheGroup], hash_block_size: int) -> tuple[SimpleEventGroup, ...]:
    """Return the descriptions of ``groups``, in their order.

    Args:
        groups: the engine's KV-cache groups.
        hash_block_size: tokens per block hash.
    """
    return tuple(
        SimpleEventGroup(
            index,
            group.gpu_block_size,
            group.gpu_block_size // hash_block_size,
            None if is_full_attention(group) else max(1, -(-(group.sliding_window or 0) // group.gpu_block_size)),
            (group.kind, group.sliding_window),
        )
        for index, group in enumerate(groups)
    )

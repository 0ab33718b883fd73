"""The KV-cache groups as KV events have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.api.engine import KVCacheGroup
from tiering.simple.cache_config import is_full_attention


@dataclass(frozen=True, slots=True)
class SimpleEventGroup:
    """One group, as :class:`tiering.offload.event_types.EventGroupConfig` has it: a CPU block is one GPU block.

    ``sliding_window_size_in_blocks``: None for full attention, of whose blocks alone snapshots are taken; at least 1
    otherwise.
    """

    group_idx: int
    offloaded_block_size: int
    hash_block_size_factor: int
    sliding_window_size_in_blocks: int | None
    kv_event_group_spec: tuple[str | None, int | None]


def event_groups(groups: Sequence[KVCacheGroup], hash_block_size: int) -> tuple[SimpleEventGroup, ...]:
    """``groups``, in their order."""
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

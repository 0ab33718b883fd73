"""KV-cache groups as the connector offloads them, and the blocks that a hit needs of each group.

A hit of n tokens needs all blocks up to n of each full-attention group. Of each sliding-window group the hit needs the
blocks that the first token after the hit attends to, and the blocks that the engine retains beside them. A group that
contains layers of a speculative head (``is_eagle``) needs one block more, which is not loaded. The engine's own prefix
cache matches and drops that block too, because the head computes the end of a block from the token after the block.

Hits end at a border between blocks of a full-attention group, or of any group in a model without full attention. A
group with larger blocks then loads the block in which the hit ends, and the engine recomputes the tail of that block.
Block sizes therefore need no common multiple. Blocks of a sliding window that no such hit can use are not stored
(:meth:`OffloadGroup.usable`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tiering.api.engine import KVCacheGroup, OffloadingSpec
from tiering.api.keys import OffloadKey
from tiering.errors import ConfigError
from tiering.offload.groups import BlockGroup, GroupKind, KVEventGroupSpec, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadGroup(BlockGroup):
    """One KV-cache group; an offloaded block consists of ``block_size_factor`` GPU blocks."""

    block_size_factor: int
    """GPU blocks in an offloaded block."""
    reach: int
    """Tokens before a position that must be present to continue from the position.

    These are the window without the present token, and the tokens that the engine retains besides.
    """
    window_blocks: int
    """Offloaded blocks that cover ``reach`` tokens before an aligned position; 0 for full attention."""
    lookahead_blocks: int
    """Blocks after the end of a hit that must be held too."""
    volatile_tokens: int
    """Number of last computed tokens that may still be computed again."""
    hit_ends: tuple[int, ...]
    """Distances between possible ends of hits, in blocks of this group; empty if every block can be used.

    Not empty only for a window group, if hits leave some of its blocks unused.
    """

    @property
    def sliding_window_size_in_blocks(self) -> int | None:
        """Offloaded blocks in a window; None for full attention."""
        return None if self.sliding_window is None else self.window_blocks

    def skipped_blocks(self, computed_tokens: int) -> int:
        """Return the number of leading GPU blocks that the engine may have freed.

        No token from ``computed_tokens`` on attends to these blocks.
        """
        if self.sliding_window is None:
            return 0
        return max(0, computed_tokens - self.reach) // self.gpu_block_size

    def usable(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the offloaded blocks at ``positions`` that a hit can use.

        The group must have :attr:`hit_ends`; without them, every block can be used. A window may be shorter than the
        distance between two possible ends of hits. Then no hit probes the blocks between the first end and the window
        before the second.
        """
        needed = np.zeros(len(positions), np.bool_)
        for distance in self.hit_ends:
            needed |= (
                positions - self.lookahead_blocks
            ) % distance >= distance - self.window_blocks - self.lookahead_blocks
        return needed


def build_groups(spec: OffloadingSpec) -> tuple[OffloadGroup, ...]:
    """Return the KV-cache groups of the engine that ``spec`` describes.

    Raises:
        ConfigError: a group's KV cannot be offloaded block by block. This applies to state-space groups, which keep one
            state instead of blocks, and to kinds whose blocks cannot be told apart by position.
    """
    engine_groups = spec.engine.groups
    if engine_groups and len(engine_groups) != len(spec.gpu_block_size):
        raise ConfigError(
            f"groups: {len(engine_groups)} KV-cache groups are described, block_sizes has {len(spec.gpu_block_size)}; "
            "describe one group per block size"
        )
    groups = tuple(
        _build_group(spec, idx, engine_groups[idx] if engine_groups else KVCacheGroup((), size))
        for idx, size in enumerate(spec.gpu_block_size)
    )
    ends = {group.offloaded_block_size for group in groups if group.sliding_window is None}
    return tuple(dataclasses.replace(group, hit_ends=_unused_between(group, ends)) for group in groups)


def _unused_between(group: OffloadGroup, ends: Collection[int]) -> tuple[int, ...]:
    """Return the distances for :attr:`OffloadGroup.hit_ends`, in blocks of ``group``."""
    size = group.offloaded_block_size
    if group.sliding_window is None or not ends or any(end % size for end in ends):
        return ()
    distances = tuple(sorted(end // size for end in ends))
    return distances if group.window_blocks + group.lookahead_blocks < distances[0] else ()


def _build_group(spec: OffloadingSpec, idx: int, group: KVCacheGroup) -> OffloadGroup:
    kind, window = kind_of(group), group.sliding_window
    if kind is GroupKind.STATE:
        raise ConfigError(
            f"KV-cache group {idx} ({group.kind}): a state-space group keeps one state and no blocks per token, "
            "which this connector cannot offload; run the model without it"
        )
    if kind is None:
        raise ConfigError(
            f"KV-cache group {idx} ({group.kind}): only full-attention and sliding-window groups can be offloaded; "
            "run the model without kv-tiering"
        )
    if kind is GroupKind.WINDOW and window is None:
        raise ConfigError(f"KV-cache group {idx} ({group.kind}): a sliding-window group needs its window in tokens")
    if window is not None and window < 1:
        raise ConfigError(
            f"KV-cache group {idx}: sliding_window {window} is not a number of tokens (a positive integer)"
        )
    size = spec.offloaded_block_size[idx]
    reach = 0 if window is None else window - 1 + group.retained_tokens
    return OffloadGroup(
        group_idx=idx,
        gpu_block_size=spec.gpu_block_size[idx],
        offloaded_block_size=size,
        block_size_factor=spec.block_size_factor,
        hash_block_size_factor=size // spec.hash_block_size,
        sliding_window=window,
        reach=reach,
        window_blocks=-(-reach // size),
        lookahead_blocks=int(group.is_eagle),
        volatile_tokens=group.volatile_tokens,
        hit_ends=(),
        kv_event_group_spec=KVEventGroupSpec(group.kind, window),
    )


def interleave(keys_by_group: Sequence[Sequence[OffloadKey]]) -> list[OffloadKey]:
    """Return the keys of all groups in one prefix order.

    The order is by position if all groups have the same number of keys, else one group after another.
    """
    if len({len(keys) for keys in keys_by_group}) == 1:
        return list(chain.from_iterable(zip(*keys_by_group, strict=True)))
    return list(chain.from_iterable(keys_by_group))

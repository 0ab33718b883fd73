"""KV-cache groups as they are offloaded, and the blocks that a hit needs of each group.

A hit of n tokens needs all blocks up to n of each full-attention group. Of each sliding-window group the hit needs the
blocks that the first token after the hit attends to, and the blocks that the engine retains beside them. Chunked local
attention is a window that begins at the last multiple of the chunk. Of a group that keeps a state the hit needs the
last block, and ends where that block ends. The engine moves and overwrites states, so a state is stored only from the
block that the engine hands over (:mod:`tiering.connector.handed_states`). A group that contains layers of a speculative
head (``is_eagle``) needs one block more, which is not loaded. The engine's own prefix cache matches and drops that
block too, because the head computes the end of a block from the token after it.

Hits end at a border between blocks of a full-attention group, or of any group in a model without full attention. A
group with larger blocks then loads the block in which the hit ends, and the engine recomputes the tail of that block.
Block sizes therefore need no common multiple. Blocks of a sliding window that no such hit can use are not stored
(:meth:`OffloadGroup.usable`), nor are those that few hits would use (:mod:`tiering.connector.hit_ends`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiering.api.engine import EngineConfig, KVCacheGroup, OffloadingSpec
from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.errors import ConfigError


class GroupKind(Enum):
    """The rule by which a token reads the earlier tokens of a KV-cache group."""

    FULL = "full"
    """Every token reads all earlier tokens: all blocks of a prefix matter."""
    WINDOW = "window"
    """A token reads the last ``sliding_window`` tokens."""
    CHUNK = "chunk"
    """A token reads the tokens before it in its chunk; chunks begin at the multiples of their size."""
    STATE = "state"
    """The group keeps one state per sequence: only the last block of a prefix matters."""


KINDS = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.WINDOW,
    "sliding_window_mla": GroupKind.WINDOW,
    "chunked_local_attention": GroupKind.CHUNK,
    "mamba": GroupKind.STATE,
    "state_space": GroupKind.STATE,
    "short_conv": GroupKind.STATE,
    "linear_attention": GroupKind.STATE,
    "gdn_attention": GroupKind.STATE,
}
"""Kind of a group by the engine's name for the kind. Groups of all other names cannot be offloaded."""


def kind_of(group: KVCacheGroup) -> GroupKind | None:
    """Return the kind of ``group``; None if the group cannot be offloaded block by block."""
    return KINDS.get(group.kind)


class KVEventGroupSpec(NamedTuple):
    """Description of a KV-cache group in KV events."""

    kind: str
    """Kind of the group, as the engine calls it."""
    window: int | None
    """Sliding window in tokens; None for full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadGroup:
    """One KV-cache group; an offloaded block consists of ``block_size_factor`` GPU blocks."""

    group_idx: int
    """Place of the group among those that are offloaded."""
    engine_idx: int
    """Index of the group in the engine's list of KV-cache groups; keys and events have it."""
    kind: GroupKind
    """Rule by which a token reads the earlier tokens."""
    gpu_block_size: int
    """Tokens in a GPU block."""
    block_size_factor: int
    """GPU blocks in an offloaded block."""
    offloaded_block_size: int
    """Tokens in an offloaded block."""
    hash_block_size_factor: int
    """Hash-blocks in an offloaded block."""
    sliding_window: int | None
    """Sliding window in tokens; None for groups of other kinds."""
    reach: int
    """Most tokens that must be present before a position to continue from it; 0 for full attention.

    These are the window without the present token, and the tokens that the engine retains besides; a chunk without its
    last token; or the one token whose block has the state.
    """
    window_blocks: int
    """Offloaded blocks that cover ``reach`` tokens before an aligned position; 0 for full attention."""
    lookahead_blocks: int
    """Blocks after the end of a hit that must be held too."""
    volatile_tokens: int
    """Number of last computed tokens that may still be computed again."""
    kv_event_group_spec: KVEventGroupSpec
    """Description of the group in KV events."""
    hit_ends: tuple[int, ...] = ()
    """Distances between possible ends of hits, in blocks of this group; empty if every block can be used.

    Not empty only for a window group, if hits leave some of its blocks unused. Default: empty.
    """
    kept_every: int | None = None
    """Distance in tokens between the windows that are stored in every prompt; 0: there are none.

    None (default): all blocks that a hit can use are stored.
    """
    selects: bool = field(init=False)
    """True if not all blocks of the group are stored."""
    is_full: bool = field(init=False)
    """True for full attention."""
    is_state: bool = field(init=False)
    """True for a group that keeps a state."""
    key_suffix: bytes = field(init=False)
    """Bytes that identify the group at the end of a key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "selects", bool(self.hit_ends) or self.kept_every is not None)
        object.__setattr__(self, "is_full", self.kind is GroupKind.FULL)
        object.__setattr__(self, "is_state", self.kind is GroupKind.STATE)
        object.__setattr__(self, "key_suffix", self.engine_idx.to_bytes(GROUP_BYTES, "big"))

    def needed_from(self, end: int) -> int:
        """Return the first token that must be present to continue from token ``end``."""
        if self.is_full:
            return 0
        if self.kind is GroupKind.CHUNK:
            return end - end % (self.reach + 1)
        return max(0, end - self.reach)

    def skipped_blocks(self, computed_tokens: int) -> int:
        """Return the number of leading GPU blocks that the engine may have freed.

        No token from ``computed_tokens`` on reads these blocks.
        """
        return self.needed_from(computed_tokens) // self.gpu_block_size

    def usable(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the offloaded blocks at ``positions`` that a hit can use.

        The group must have :attr:`hit_ends`; without them, every block can be used. A window may be shorter than the
        distance between two possible ends of hits. Then no hit probes the blocks between the first end and the window
        before the second.
        """
        needed = np.zeros(len(positions), np.bool_)
        for distance in self.hit_ends:
            needed |= self.before_multiples(positions, distance)
        return needed

    def before_multiples(self, positions: NDArray[np.int64], distance: int) -> NDArray[np.bool_]:
        """Return a mask of the blocks that a hit needs which ends at a multiple of ``distance``.

        Args:
            positions: positions of offloaded blocks.
            distance: number of offloaded blocks, more than a window has.
        """
        return (positions - self.lookahead_blocks) % distance >= distance - self.window_blocks - self.lookahead_blocks


def build_groups(spec: OffloadingSpec) -> tuple[OffloadGroup, ...]:
    """Return the KV-cache groups of the engine that ``spec`` describes.

    Raises:
        ConfigError: a group's KV cannot be offloaded block by block. This applies to kinds whose blocks cannot be told
            apart by position, and to groups of states without full attention, or with larger offloaded blocks.
    """
    engine_groups = spec.engine.groups
    if engine_groups and len(engine_groups) != len(spec.gpu_block_size):
        raise ConfigError(
            f"groups: {len(engine_groups)} KV-cache groups are described, block_sizes has {len(spec.gpu_block_size)}; "
            "describe one group per block size"
        )
    groups = [
        dataclasses.replace(engine_groups[idx] if engine_groups else KVCacheGroup((), size), gpu_block_size=size)
        for idx, size in enumerate(spec.gpu_block_size)
    ]
    interval = spec.engine.retention_interval
    built = offload_groups(groups, spec.hash_block_size, spec.block_size_factor, interval)
    for group in built:
        if group.is_state and spec.block_size_factor > 1:
            raise ConfigError(
                f"block_size, blocks_per_chunk: cannot be used, KV-cache group {group.group_idx} "
                f"({groups[group.group_idx].kind}) keeps one state per GPU block; leave both out"
            )
        if group.is_state and not any(other.is_full for other in built):
            raise ConfigError(
                f"KV-cache group {group.group_idx} ({groups[group.group_idx].kind}): states are offloaded only beside "
                "a group with full attention, which the model lacks; run the model without this connector"
            )
    return built


def offload_groups(
    groups: Sequence[KVCacheGroup], hash_block_size: int, factor: int = 1, retention_interval: int | None = None
) -> tuple[OffloadGroup, ...]:
    """Return ``groups`` as they are offloaded.

    Args:
        groups: the engine's KV-cache groups.
        hash_block_size: tokens in a hash-block.
        factor: GPU blocks in an offloaded block; default: 1.
        retention_interval: as in :class:`~tiering.api.engine.EngineConfig`; default: None.

    Raises:
        ConfigError: the blocks of a group cannot be told apart by position.
    """
    built = [_offload_group(idx, group, hash_block_size, factor) for idx, group in enumerate(groups)]
    ends = {group.offloaded_block_size for group in built if group.is_full}
    return tuple(
        dataclasses.replace(
            group,
            hit_ends=_unused_between(group, ends),
            kept_every=_kept_every(group, ends, retention_interval),
        )
        for group in built
    )


def tail_unit(groups: Sequence[OffloadGroup], engine: EngineConfig) -> int:
    """Return the distance between ends of hits inside of blocks, in tokens; 0 if there are no such ends.

    Engines with states may match prefixes in smaller steps than their blocks (vLLM: ``--prefix-match-unit``). This is
    followed if such an end lies in the same block of all groups, and if each of them needs that block and no later one.

    Args:
        groups: the KV-cache groups.
        engine: configuration of the engine.
    """
    sizes = {group.offloaded_block_size for group in groups}
    simple = all(group.is_full or group.is_state for group in groups)
    steps = any(group.lookahead_blocks or group.block_size_factor > 1 for group in groups)
    if len(sizes) > 1 or not simple or steps or not any(group.is_state for group in groups):
        return 0
    if engine.has_scratch or engine.context_parallel_size > 1 or engine.hash_block_size >= min(sizes):
        return 0
    return engine.hash_block_size


def _unused_between(group: OffloadGroup, ends: Collection[int]) -> tuple[int, ...]:
    """Return the distances for :attr:`OffloadGroup.hit_ends`, in blocks of ``group``."""
    size = group.offloaded_block_size
    if group.sliding_window is None or not ends or any(end % size for end in ends):
        return ()
    distances = tuple(sorted(end // size for end in ends))
    return distances if group.window_blocks + group.lookahead_blocks < distances[0] else ()


def _kept_every(group: OffloadGroup, ends: Collection[int], retention_interval: int | None) -> int | None:
    """Return the value for :attr:`OffloadGroup.kept_every`.

    Without full attention, nothing would show where prompts part, so all windows are stored.
    """
    size = group.offloaded_block_size
    if group.sliding_window is None or retention_interval is None or not ends or any(end % size for end in ends):
        return None
    step = math.lcm(*ends)
    every = -(-retention_interval // step) * step
    return None if 0 < every // size <= group.window_blocks + group.lookahead_blocks else every


def _offload_group(idx: int, group: KVCacheGroup, hash_block_size: int, factor: int) -> OffloadGroup:
    kind, window, reach = kind_of(group), None, 0
    if kind is None:
        raise ConfigError(
            f"KV-cache group {idx} ({group.kind}): groups of this kind cannot be offloaded, only {', '.join(KINDS)}; "
            "run the model without kv-tiering"
        )
    if kind is GroupKind.WINDOW or kind is GroupKind.CHUNK:
        window = group.sliding_window
        if window is None or window < 1:
            raise ConfigError(
                f"KV-cache group {idx} ({group.kind}): sliding_window {window} is not a number of tokens "
                "(a positive integer)"
            )
        reach = window - 1 + group.retained_tokens
        window = window if kind is GroupKind.WINDOW else None
    elif kind is GroupKind.STATE:
        reach = 1
    size = group.gpu_block_size * factor
    return OffloadGroup(
        group_idx=idx,
        engine_idx=idx if group.engine_idx is None else group.engine_idx,
        kind=kind,
        gpu_block_size=group.gpu_block_size,
        block_size_factor=factor,
        offloaded_block_size=size,
        hash_block_size_factor=size // hash_block_size,
        sliding_window=window,
        reach=reach,
        window_blocks=-(-reach // size),
        lookahead_blocks=int(group.is_eagle),
        volatile_tokens=group.volatile_tokens,
        kv_event_group_spec=KVEventGroupSpec(group.kind, window),
    )


def interleave(keys_by_group: Sequence[Sequence[OffloadKey]]) -> list[OffloadKey]:
    """Return the keys of all groups in one prefix order.

    The order is by position if all groups have the same number of keys, else one group after another.
    """
    if len(keys_by_group) == 1:
        return list(keys_by_group[0])
    if len({len(keys) for keys in keys_by_group}) == 1:
        return list(chain.from_iterable(zip(*keys_by_group, strict=True)))
    return list(chain.from_iterable(keys_by_group))

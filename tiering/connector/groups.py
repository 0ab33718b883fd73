"""KV-cache groups as the connector offloads them, and the search for the longest usable hit over all of them.

A hit of n tokens needs, for each full-attention group, all blocks up to n, and for each sliding-window group the blocks
that cover the tokens before n that the first token after the hit attends to, and those that the engine retains beside
them.  A group of which a speculative head has layers (``is_eagle``) needs one block more, which is not loaded: the
engine's own prefix cache matches and drops it too, because the head's KV at the end of a block is computed from the
token after it.

Where hits may end: at a border between blocks of a full-attention group (of any group, in a model without full
attention).  Groups whose blocks are larger then load the block in which the hit ends, of which the engine computes the
tail anew; so blocks of unequal sizes need no common multiple.  What no such hit can use of a sliding window is not
stored (:meth:`OffloadGroup.usable`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiering.api.engine import KVCacheGroup, OffloadingSpec
from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.errors import ConfigError

_STATE_KINDS = ("mamba", "state", "linear", "gdn")
_FOREIGN_KINDS = ("chunked", "cross", "encoder")


class KVEventGroupSpec(NamedTuple):
    """What events say about a group: its kind, and its window in tokens (None: none)."""

    kind: str
    window: int | None


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """One KV-cache group.  Sizes in tokens; ``block_size_factor`` GPU blocks make an offloaded block.

    ``hash_block_size_factor``: hash-blocks in one offloaded block.  ``sliding_window``: tokens, None for full
    attention. ``reach``: tokens before a position that must be there to go on from it (the window without the present
    token, and what the engine retains besides).  ``window_blocks``: offloaded blocks that cover them before an aligned
    position (0 for full attention). ``lookahead_blocks``: blocks after the end of a hit that must be held too.
    ``volatile_tokens``: as many of the last computed tokens may still be computed again.  ``hit_ends``: for a window
    group, the distances between hits that may leave some of its blocks unused, in its blocks; empty where every block
    is of use.
    """

    group_idx: int
    gpu_block_size: int
    offloaded_block_size: int
    block_size_factor: int
    hash_block_size_factor: int
    sliding_window: int | None
    reach: int
    window_blocks: int
    lookahead_blocks: int
    volatile_tokens: int
    hit_ends: tuple[int, ...]
    key_suffix: bytes
    kv_event_group_spec: KVEventGroupSpec

    @property
    def sliding_window_size_in_blocks(self) -> int | None:
        """Offloaded blocks in a window; None for full attention."""
        return None if self.sliding_window is None else self.window_blocks

    def skipped_blocks(self, computed_tokens: int) -> int:
        """GPU blocks at the head that no token from ``computed_tokens`` on attends to: the engine may have freed them."""
        if self.sliding_window is None:
            return 0
        return max(0, computed_tokens - self.reach) // self.gpu_block_size

    def usable(self, positions: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which offloaded blocks a hit can use; None: all.

        Where a window is shorter than the distance between two possible ends of hits, the blocks after the one and
        before the window of the other are never asked for.
        """
        if not self.hit_ends:
            return None
        needed = np.zeros(len(positions), np.bool_)
        for distance in self.hit_ends:
            needed |= (
                positions - self.lookahead_blocks
            ) % distance >= distance - self.window_blocks - self.lookahead_blocks
        return needed


def build_groups(spec: OffloadingSpec) -> tuple[OffloadGroup, ...]:
    """The groups of ``spec``'s engine.

    Raises :class:`ConfigError` for a group whose KV this connector cannot offload block by block: state-space groups
    (one state, not a row of blocks), and kinds whose blocks it could not tell apart by position.
    """
    engine_groups = spec.engine.groups
    if engine_groups and len(engine_groups) != len(spec.gpu_block_size):
        raise ConfigError(
            f"groups: {len(engine_groups)} KV-cache groups are described, block_sizes has {len(spec.gpu_block_size)}"
        )
    groups = tuple(
        _build_group(spec, idx, engine_groups[idx] if engine_groups else KVCacheGroup((), size))
        for idx, size in enumerate(spec.gpu_block_size)
    )
    ends = {group.offloaded_block_size for group in groups if group.sliding_window is None}
    return tuple(dataclasses.replace(group, hit_ends=_unused_between(group, ends)) for group in groups)


def _unused_between(group: OffloadGroup, ends: Collection[int]) -> tuple[int, ...]:
    """The distances between ends of hits, in blocks of a window group, if hits leave some of its blocks unused."""
    size = group.offloaded_block_size
    if group.sliding_window is None or not ends or any(end % size for end in ends):
        return ()
    distances = tuple(sorted(end // size for end in ends))
    return distances if group.window_blocks + group.lookahead_blocks < distances[0] else ()


def _build_group(spec: OffloadingSpec, idx: int, group: KVCacheGroup) -> OffloadGroup:
    kind, window = group.kind.lower(), group.sliding_window
    if any(word in kind for word in _STATE_KINDS):
        raise ConfigError(
            f"KV-cache group {idx} ({group.kind}): a state-space group keeps one state and no blocks per token, which this "
            "connector cannot offload; run the model without it"
        )
    if any(word in kind for word in _FOREIGN_KINDS):
        raise ConfigError(
            f"KV-cache group {idx} ({group.kind}): only full-attention and sliding-window groups can be offloaded"
        )
    if "sliding" in kind and window is None:
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
        key_suffix=idx.to_bytes(GROUP_BYTES, "big"),
        kv_event_group_spec=KVEventGroupSpec(group.kind, window),
    )


def interleave(keys_by_group: Sequence[Sequence[OffloadKey]]) -> list[OffloadKey]:
    """All groups' keys in one prefix order: by position where the groups have as many blocks, else one group after another."""
    if len({len(keys) for keys in keys_by_group}) == 1:
        return list(chain.from_iterable(zip(*keys_by_group, strict=True)))
    return list(chain.from_iterable(keys_by_group))

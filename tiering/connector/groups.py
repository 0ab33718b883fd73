"""KV-cache groups as the connector offloads them, and the search for the longest usable hit over all of them.

A hit of n tokens needs, for each full-attention group, all blocks up to n, and for each sliding-window group the blocks that
cover the ``window - 1`` tokens before n: what the first token after the hit attends to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from tiering.base import GROUP_BYTES, KVCacheGroup, OffloadingManager, OffloadingSpec, OffloadKey, ReqContext
from tiering.errors import ConfigError

_STATE_KINDS = ("mamba", "state", "linear", "gdn")
_FOREIGN_KINDS = ("chunked", "cross", "encoder")
MAX_WINDOW_PROBES = 64
"""How often one search may move to the left because a window block is missing; each move can cost a question to a slow tier."""


class KVEventGroupSpec(NamedTuple):
    """What events say about a group: its kind, and its window in tokens (None: none)."""

    kind: str
    window: int | None


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """One KV-cache group.  Sizes in tokens; ``block_size_factor`` GPU blocks make an offloaded block.

    ``hash_block_size_factor``: hash-blocks in one offloaded block.  ``sliding_window``: tokens, None for full attention.
    ``window_blocks``: offloaded blocks that cover the ``sliding_window - 1`` tokens before an aligned position (0 for full attention).
    """

    group_idx: int
    gpu_block_size: int
    offloaded_block_size: int
    block_size_factor: int
    hash_block_size_factor: int
    sliding_window: int | None
    window_blocks: int
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
        return max(0, computed_tokens - self.sliding_window + 1) // self.gpu_block_size


def build_groups(spec: OffloadingSpec) -> tuple[OffloadGroup, ...]:
    """The groups of ``spec``'s engine.

    Raises :class:`ConfigError` for a group whose KV this connector cannot offload block by block: state-space groups (one state,
    not a row of blocks), and kinds whose blocks it could not tell apart by position.
    """
    engine_groups = spec.engine.groups
    if engine_groups and len(engine_groups) != len(spec.gpu_block_size):
        raise ConfigError(f"groups: {len(engine_groups)} KV-cache groups are described, block_sizes has {len(spec.gpu_block_size)}")
    return tuple(
        _build_group(spec, idx, engine_groups[idx] if engine_groups else KVCacheGroup((), size))
        for idx, size in enumerate(spec.gpu_block_size)
    )


def _build_group(spec: OffloadingSpec, idx: int, group: KVCacheGroup) -> OffloadGroup:
    kind, window = group.kind.lower(), group.sliding_window
    if any(word in kind for word in _STATE_KINDS):
        raise ConfigError(
            f"KV-cache group {idx} ({group.kind}): a state-space group keeps one state and no blocks per token, which this "
            "connector cannot offload; run the model without it"
        )
    if any(word in kind for word in _FOREIGN_KINDS):
        raise ConfigError(f"KV-cache group {idx} ({group.kind}): only full-attention and sliding-window groups can be offloaded")
    if "sliding" in kind and window is None:
        raise ConfigError(f"KV-cache group {idx} ({group.kind}): a sliding-window group needs its window in tokens")
    if window is not None and window < 1:
        raise ConfigError(f"KV-cache group {idx}: sliding_window {window} is not a number of tokens (a positive integer)")
    size = spec.offloaded_block_size[idx]
    return OffloadGroup(
        group_idx=idx,
        gpu_block_size=spec.gpu_block_size[idx],
        offloaded_block_size=size,
        block_size_factor=spec.block_size_factor,
        hash_block_size_factor=size // spec.hash_block_size,
        sliding_window=window,
        window_blocks=0 if window is None else -(-(window - 1) // size),
        key_suffix=idx.to_bytes(GROUP_BYTES, "big"),
        kv_event_group_spec=KVEventGroupSpec(group.kind, window),
    )


def interleave(keys_by_group: Sequence[Sequence[OffloadKey]]) -> list[OffloadKey]:
    """All groups' keys in one prefix order: by position where the groups have as many blocks, else one group after another."""
    if len({len(keys) for keys in keys_by_group}) == 1:
        return list(chain.from_iterable(zip(*keys_by_group, strict=True)))
    return list(chain.from_iterable(keys_by_group))


class Hit(NamedTuple):
    """``tokens``: end of the usable prefix (at most what is computed: no hit).  ``pending``: the answer may still change."""

    tokens: int
    pending: bool


class HitSearch:
    """Finds the longest prefix that all groups hold, beyond what is computed."""

    def __init__(self, groups: Sequence[OffloadGroup], manager: OffloadingManager) -> None:
        self._groups = groups
        self._manager = manager
        self._full = [group for group in groups if group.sliding_window is None]
        self._windows = [group for group in groups if group.window_blocks]
        self._unit = math.lcm(*(group.offloaded_block_size for group in groups))
        self.tokens_to_leave = int(
            any((group.sliding_window - 1) % group.gpu_block_size == 0 for group in groups if group.sliding_window)
        )
        """Tokens of a request that no hit may cover.

        When all of a request is held, the engine recomputes the last token, which sees one token more to the left than the token
        after it.  Where that one is in a block of its own, which a hit does not need, at least one token must be left to compute.
        """

    def first_block(self, group: OffloadGroup, computed: int, end: int) -> int:
        """The first offloaded block of ``group`` that a hit of ``end`` tokens needs beyond ``computed`` ones."""
        size = group.offloaded_block_size
        first = computed // size
        return first if group.sliding_window is None else max(first, end // size - group.window_blocks)

    def needed(self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int) -> list[Sequence[OffloadKey]]:
        """The keys, by group, that a hit of ``end`` tokens needs beyond ``computed`` ones."""
        return [
            group_keys[self.first_block(group, computed, end) : end // group.offloaded_block_size]
            for group, group_keys in zip(self._groups, keys, strict=True)
        ]

    def longest(self, keys: Sequence[Sequence[OffloadKey]], computed: int, limit: int, ctx: ReqContext) -> Hit:
        """The longest usable prefix of at most ``limit`` tokens, in whole blocks of every group.

        Full attention first, as a prefix from the block that contains the first uncomputed token; then the windows, from the right:
        a block missing in a window moves the end to where that block begins, and everything is asked again for that end.
        """
        end = min(limit, *(len(keys[g.group_idx]) * g.offloaded_block_size for g in self._groups))
        end -= end % self._unit
        pending = False
        for group in self._full:
            size = group.offloaded_block_size
            first = computed // size
            if end <= computed:
                return Hit(computed, pending)
            answer = self._manager.match_prefix(keys[group.group_idx][first : end // size], ctx)
            pending = pending or answer.pending
            end = min(end, (first + answer.hits) * size)
            end -= end % self._unit
        return self._windows_end(keys, computed, end, pending, ctx) if self._windows else Hit(end, pending)

    def _windows_end(self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int, pending: bool, ctx: ReqContext) -> Hit:
        agreed, turn, probes = 0, 0, MAX_WINDOW_PROBES
        while agreed < len(self._windows):
            if end <= computed or not probes:
                return Hit(computed, pending)
            group = self._windows[turn % len(self._windows)]
            turn += 1
            size = group.offloaded_block_size
            first = self.first_block(group, computed, end)
            wanted = keys[group.group_idx][first : end // size]
            answer = self._manager.match_prefix(wanted, ctx)
            pending = pending or answer.pending
            if answer.hits == len(wanted):
                agreed += 1
            elif answer.pending:
                break
            else:
                end = (first + answer.hits) * size
                end -= end % self._unit
                agreed, probes = 0, probes - 1
        return Hit(end, pending)

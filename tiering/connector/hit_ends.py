"""The positions where hits may end, and the blocks of sliding windows that are stored for them.

A hit needs the blocks of a window before its end, and no others. An engine may keep the windows of its own prefix cache
sparsely (vLLM: ``--prefix-cache-retention-interval``); the tiers then do as well. Of a prompt, the windows are stored
before these positions:

- the last two ends of hits in the prompt: the prompt itself comes again, or its conversation goes on, where a chat
  template may leave out the last tokens (``<think>``);
- the end of the request's own hit, and the place where it parts from a stored prompt: full attention is held up to
  there, and the window is not. The engine may have seen such a place in its own cache, too;
- every position at the interval, if the engine has one.

Every block behind the prompt is stored as it is computed: an answer may end anywhere, and its conversation goes on from
there. The engine frees and overwrites the window of a request that has ended, so it cannot be stored at that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.connector.groups import OffloadGroup
from tiering.connector.tracked import TrackedRequest


class HitEnds:
    """The positions where hits may end.

    Args:
        groups: the KV-cache groups.
        has_scratch: True if the engine makes the content of other groups anew after a hit; default: False.
    """

    def __init__(self, groups: Sequence[OffloadGroup], has_scratch: bool = False) -> None:
        self._groups = groups
        full = [group for group in groups if group.is_full]
        states = [group for group in groups if group.is_state]
        common = [group.offloaded_block_size for group in (groups if has_scratch else states)]
        self.sizes = sorted({math.lcm(group.offloaded_block_size, *common) for group in full or groups})
        """Distances between the ends of hits, in tokens."""

    def aligned(self, end: int) -> int:
        """Return the last position at or before ``end`` where a hit may end."""
        if len(self.sizes) == 1:
            return end - end % self.sizes[0]
        return max(end - end % size for size in self.sizes)

    def last(self, blocks: Sequence[int], limit: int) -> int:
        """Return the last end of a hit of at most ``limit`` tokens.

        Args:
            blocks: number of blocks that are known, by group.
            limit: number of tokens.
        """
        end = limit
        for group, known in zip(self._groups, blocks, strict=True):
            end = min(end, (known - group.lookahead_blocks) * group.offloaded_block_size)
        return self.aligned(end)

    def stored(
        self, group: OffloadGroup, positions: range, state: TrackedRequest[Any], limit: int
    ) -> NDArray[np.bool_] | None:
        """Return a mask of the blocks at ``positions`` that are stored; None: all of them.

        Args:
            group: their KV-cache group.
            positions: positions of offloaded blocks in the request.
            state: the request.
            limit: leading tokens of the request that may be stored.
        """
        if group.kept_every is None:
            return group.usable(np.array(positions)) if group.hit_ends else None
        size = group.offloaded_block_size
        # A request for the same prompt leaves its last token to compute.
        tokens = min(state.request.num_prompt_tokens, limit) - 1
        prompt_end = self.last([tokens // other.offloaded_block_size for other in self._groups], tokens)
        behind = group.needed_from(self.aligned(max(0, prompt_end - 1))) // size
        if positions.start >= behind and not group.hit_ends:
            return None
        places = np.array(positions)
        stored = places >= behind
        if group.kept_every:
            stored |= group.before_multiples(places, group.kept_every // size)
        for place in {state.parted_at, state.filled_tokens, getattr(state.request, "shared_prefix_boundary", 0)}:
            if end := self.aligned(place):
                # Where prompts part, the block after that end differs too, so that a lookahead needs an end before it.
                first = self.aligned(end - 1) if group.lookahead_blocks else end
                stored |= (places >= group.needed_from(first) // size) & (
                    places < -(-end // size) + group.lookahead_blocks
                )
        return stored & group.usable(places) if group.hit_ends else stored

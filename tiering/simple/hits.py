"""The search for the longest prefix that the CPU pool holds, over KV-cache groups of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from tiering.api.engine import KVCacheGroup
from tiering.api.keys import OffloadKey
from tiering.offload.groups import BlockGroup, GroupKind, KVEventGroupSpec, kind_of

Keys = Sequence[Sequence[OffloadKey]]
"""The names of a request's blocks, per KV-cache group, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNeeds(BlockGroup):
    """One KV-cache group, with the rule by which a sequence needs its blocks.

    A CPU block is one GPU block.
    """

    is_full: bool
    """True for full attention."""
    is_state: bool
    """True for a group that keeps a state."""
    window: int
    """Tokens that a token reads or that the engine retains before it; 0 unless the group has a window.

    The engine hands out the tokens that it retains before a window as filled, like the window itself.
    """

    @property
    def sliding_window_size_in_blocks(self) -> int | None:
        """Blocks in a window, at least 1; None for full attention.

        Only blocks of full attention get snapshots for KV events.
        """
        return None if self.is_full else max(1, -(-(self.sliding_window or 0) // self.gpu_block_size))

    def first_needed(self, tokens: int) -> int:
        """Return the first block that the token after ``tokens`` tokens reads.

        Earlier blocks are never read again.
        """
        if self.is_full:
            return 0
        if self.is_state:
            return max(0, tokens - 1) // self.gpu_block_size
        return max(0, tokens - self.window + 1) // self.gpu_block_size

    def longest(self, held: bytes, start: int, blocks: int, step: int) -> int:
        """Return the largest multiple of ``step`` at which all needed blocks from ``start`` on are held.

        Args:
            held: 1 or 0 for each block from ``start`` on: the CPU pool holds the block or not.
            start: first block that is not on the GPU.
            blocks: upper limit of the result, in blocks.
            step: blocks between two possible ends of a hit.

        Returns:
            The end of the hit, in blocks; ``start`` if there is no hit.
        """
        if self.is_full:
            missing = held.find(b"\0", 0, blocks - start)
            end = blocks if missing < 0 else start + missing
            return max(start, end // step * step)
        end = blocks // step * step
        while end > start:
            if self.is_state:
                found = held.rfind(b"\1", 0, end - start) + 1 + start
                if found == end:
                    return end
                end = found // step * step
                continue
            first = max(start, self.first_needed(end * self.gpu_block_size))
            missing = held.rfind(b"\0", first - start, end - start)
            if missing < 0:
                return end
            end = (start + missing) // step * step
        return start


def needs_of(groups: Sequence[KVCacheGroup], hash_block_size: int) -> tuple[GroupNeeds, ...]:
    """Return the needs of ``groups``, in their order.

    Args:
        groups: the engine's KV-cache groups.
        hash_block_size: tokens per block hash.
    """
    needs = []
    for index, group in enumerate(groups):
        kind, size = kind_of(group), group.gpu_block_size
        has_window = kind is GroupKind.WINDOW
        needs.append(
            GroupNeeds(
                group_idx=index,
                gpu_block_size=size,
                offloaded_block_size=size,
                hash_block_size_factor=size // hash_block_size,
                sliding_window=group.sliding_window,
                kv_event_group_spec=KVEventGroupSpec(group.kind, group.sliding_window),
                is_full=kind is GroupKind.FULL,
                is_state=kind is GroupKind.STATE,
                window=(group.sliding_window or 0) + group.retained_tokens if has_window else 0,
            )
        )
    return tuple(needs)


class HitSearch:
    """The search for hits over all groups of an engine. A hit ends where a block ends in every group."""

    def __init__(self, needs: Sequence[GroupNeeds]) -> None:
        self.needs = needs
        self.alignment = lcm(*(need.gpu_block_size for need in needs))
        self._order = sorted(range(len(needs)), key=lambda index: not needs[index].is_full)

    def longest(self, keys: Keys, computed: int, limit: int, is_held: Callable[[OffloadKey], bool]) -> int:
        """Return the end of the longest hit, in tokens.

        Args:
            keys: names of the request's blocks, per group.
            computed: tokens that are on the GPU already.
            limit: largest end of a hit, in tokens.
            is_held: returns True if the CPU pool holds the block of that name.

        Returns:
            The end of the hit; ``computed`` if no hit goes beyond it.
        """
        end = min(limit, *(len(names) * need.gpu_block_size for names, need in zip(keys, self.needs, strict=True)))
        end = end // self.alignment * self.alignment
        if end <= computed or computed % self.alignment:
            return computed
        held: dict[int, bytes] = {}
        settled = 0
        # Every group can only shorten the hit, so the loop ends: at the latest when all groups agree in a row.
        while settled < len(self._order):
            for group in self._order:
                need = self.needs[group]
                size = need.gpu_block_size
                if group not in held:
                    held[group] = bytes(map(is_held, keys[group][computed // size : end // size]))
                found = need.longest(held[group], computed // size, end // size, self.alignment // size) * size
                if found <= computed:
                    return computed
                settled = settled + 1 if found == end else 1
                end = found
                if settled >= len(self._order):
                    break
        return end

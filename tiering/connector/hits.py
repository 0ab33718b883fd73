"""The search for the longest usable hit over all KV-cache groups (what a hit needs: :mod:`tiering.connector.groups`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.api.request import ReqContext
from tiering.connector.groups import OffloadGroup

MAX_WINDOW_PROBES = 64
"""How often one search may move to the left because a window block is missing; each move can cost a question to a slow tier."""


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
        self._windows = [group for group in groups if group.sliding_window is not None and group.window_blocks]
        self._ends = sorted({group.offloaded_block_size for group in self._full or groups})
        self._least = min(group.offloaded_block_size for group in groups)
        self.tokens_to_leave = int(any(map(self._recomputes_across_a_border, groups)))
        """Tokens of a request that no hit may cover.

        When all of a request is held, the engine recomputes the last token, which sees one token more to the left than
        the token after it.  Where that one is in a block of its own, which a hit does not need, at least one token must
        be left to compute.
        """

    def _recomputes_across_a_border(self, group: OffloadGroup) -> bool:
        if group.sliding_window is None or group.reach >= group.sliding_window:
            return False
        return group.reach % math.gcd(group.gpu_block_size, *self._ends) == 0

    def first_block(self, group: OffloadGroup, computed: int, end: int) -> int:
        """The first offloaded block of ``group`` that a hit of ``end`` tokens needs beyond ``computed`` ones."""
        size = group.offloaded_block_size
        first = computed // size
        return first if group.sliding_window is None else max(first, (end - group.reach) // size)

    def needed(self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int) -> list[Sequence[OffloadKey]]:
        """The keys, by group, that a hit of ``end`` tokens needs beyond ``computed`` ones."""
        return [
            group_keys[self.first_block(group, computed, end) : -(-end // group.offloaded_block_size)]
            for group, group_keys in zip(self._groups, keys, strict=True)
        ]

    def longest(self, keys: Sequence[Sequence[OffloadKey]], computed: int, limit: int, ctx: ReqContext) -> Hit:
        """The longest usable prefix of at most ``limit`` tokens, in whole blocks; none shorter than a block beyond ``computed``.

        Full attention first, as a prefix from the block that contains the first uncomputed token; then the windows,
        from the right: a block missing in a window moves the end to where that block begins, and everything is asked
        again for that end.  Nothing is asked for, and so nothing is brought in, that would make a hit of less than a
        block.
        """
        end = self._aligned(
            min(limit, *((len(keys[g.group_idx]) - g.lookahead_blocks) * g.offloaded_block_size for g in self._groups))
        )
        pending = False
        for group in self._full:
            if end - computed < self._least:
                return Hit(computed, False)
            size = group.offloaded_block_size
            first = computed // size
            wanted = keys[group.group_idx][first : -(-end // size) + group.lookahead_blocks]
            least = -(-(computed + self._least) // size) - first + group.lookahead_blocks
            answer = self._manager.match_prefix(wanted, ctx, at_least=least)
            pending = pending or answer.pending
            if answer.hits < len(wanted):
                end = min(end, self._aligned((first + answer.hits - group.lookahead_blocks) * size))
                if end - computed < self._least:
                    return Hit(computed, answer.pending)
        if end - computed < self._least:
            return Hit(computed, False)
        return self._windows_end(keys, computed, end, pending, ctx) if self._windows else Hit(end, pending)

    def _windows_end(
        self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int, pending: bool, ctx: ReqContext
    ) -> Hit:
        agreed, turn, probes = 0, 0, MAX_WINDOW_PROBES
        while agreed < len(self._windows):
            if end - computed < self._least or not probes:
                return Hit(computed, pending)
            group = self._windows[turn % len(self._windows)]
            turn += 1
            size = group.offloaded_block_size
            first = self.first_block(group, computed, end)
            wanted = keys[group.group_idx][first : -(-end // size) + group.lookahead_blocks]
            answer = self._manager.match_prefix(wanted, ctx)
            pending = pending or answer.pending
            if answer.hits == len(wanted):
                agreed += 1
            elif answer.pending:
                break
            else:
                end = min(end - 1, (first + answer.hits - group.lookahead_blocks) * size)
                end = self._aligned(end)
                agreed, probes = 0, probes - 1
        return Hit(end, pending)

    def _aligned(self, end: int) -> int:
        """The last place at or before ``end`` where a hit may end."""
        return max(end - end % size for size in self._ends)

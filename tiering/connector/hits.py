"""The search for the longest usable hit over all KV-cache groups.

:mod:`tiering.connector.groups` describes the blocks that a hit needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.connector.groups import GroupKind, OffloadGroup
from tiering.connector.hit_ends import HitEnds
from tiering.connector.tracked import TrackedRequest

MAX_WINDOW_PROBES = 64
"""Number of times that one search may shorten the hit because a window block is missing.

Each time can cost a probe of a slow tier. So many blocks are also looked at together, to find the next end to try.
"""


class PrefixLookup(Protocol):
    """The blocks that are held: a manager of tiers, or the simple scheduler's CPU pool."""

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        """Look up a prefix; see :meth:`tiering.api.manager.OffloadingManager.match_prefix`."""

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[bool | None]:
        """Look up blocks; see :meth:`tiering.api.manager.OffloadingManager.lookup_each`."""

    def held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixMatch:
        """Look at a prefix; see :meth:`tiering.api.manager.OffloadingManager.held`."""


class Hit(NamedTuple):
    """Result of a search."""

    tokens: int
    """End of the usable prefix in tokens; without a hit, at most the number of computed tokens."""
    pending: bool
    """True if a later search may give another result."""
    parted_at: int = 0
    """Tokens up to which full attention is held, if windows cut the hit; else 0."""


class Tails:
    """The hits that end inside of a block, and the keys of the blocks that are filled up to there.

    An engine with states may keep the state at the last border of hash-blocks in a prompt. The states there, and the
    attention blocks that are filled up to there, are stored under the hash of that border: no whole block has it. What
    an attention block holds behind that border is computed again after a hit.

    Args:
        groups: the KV-cache groups, whose blocks have the same size.
        held: probes the tiers.
        unit: tokens in a hash-block.
    """

    def __init__(self, groups: Sequence[OffloadGroup], held: PrefixLookup, unit: int) -> None:
        self._groups = groups
        self._held = held
        self._unit = unit
        self._size = groups[0].offloaded_block_size
        self._probed = sorted(range(len(groups)), key=lambda index: not groups[index].is_state)
        """Indexes of the groups in the order of a probe: the states are missing most often."""
        self._full = [group.group_idx for group in groups if group.is_full]
        self._states = [group.key_suffix for group in groups if group.is_state]

    def keys(self, state: TrackedRequest[Any], end: int) -> list[OffloadKey]:
        """Return the keys of the blocks that are filled up to token ``end``, by group.

        None, if blocks end there, if ``end`` has no hash, or if the request has a variant.
        """
        hashes = state.request.block_hashes
        if end % self._size == 0 or end % self._unit or end > len(hashes) * self._unit or state.variant is not None:
            return []
        name = hashes[end // self._unit - 1]
        return [name + group.key_suffix for group in self._groups]

    def extend(self, hit: Hit, state: TrackedRequest[Any], computed: int, limit: int) -> Hit:
        """Return a longer hit that ends inside of a block; ``hit`` itself if there is none.

        Engines that keep the state at the end of a prompt within a step (vLLM on GPUs) keep none at the blocks before
        it. So the last ends are looked at, and those in the block after ``hit``: their states in one call, and all of
        them before an answer is waited for. Then ends whose states may be held are probed from the right. At most half
        of the ends lie behind that block.

        Args:
            hit: the longest hit of whole blocks; a pending one is returned as it is.
            state: the request.
            computed: tokens that the engine has computed.
            limit: largest number of tokens that the hit may cover.
        """
        base, pending = max(hit.tokens, computed), False
        if hit.pending or base % self._size or state.variant is not None:
            return hit
        hashes = state.request.block_hashes
        last = min(limit - limit % self._unit, len(hashes) * self._unit)
        near = min(last, base + self._size - self._unit)
        far = range(last, near, -self._unit)[: MAX_WINDOW_PROBES // 2]
        heads = [group.keys[base // self._size] for group in map(state.groups.__getitem__, self._full)] if far else []
        if heads and False in self._held.lookup_each(heads, state.ctx):
            far = range(0)
        ends = [*far, *range(near, base, -self._unit)[: MAX_WINDOW_PROBES - len(far)]]
        ends = [end for end in ends if end % self._size]
        for suffix in self._states if ends else ():
            held = self._held.lookup_each([hashes[end // self._unit - 1] + suffix for end in ends], state.ctx)
            ends = [end for end, answer in zip(ends, held, strict=True) if answer is not False]
        for end in ends:
            tails = self.keys(state, end)
            runs = [[tails[index] for index in self._probed]]
            if end > near:
                whole = slice(base // self._size, end // self._size)
                runs += [group.keys[whole] for group in map(state.groups.__getitem__, self._full)]
            for run in runs:
                answer = self._held.match_prefix(run, state.ctx, at_least=len(run))
                pending = pending or answer.pending
                if answer.hits < len(run):
                    break
            else:
                return Hit(end, pending)
        return Hit(hit.tokens, pending, hit.parted_at)


class HitSearch:
    """Search for the longest prefix beyond the computed tokens that all groups hold.

    Args:
        groups: the KV-cache groups.
        held: probes the tiers.
        most_probes: number of times that one search may shorten the hit because a block of a window or a state is
            missing; default: :data:`MAX_WINDOW_PROBES`.
        has_scratch: True if the engine makes the content of other groups anew after a hit; default: False.
        tail_unit: distance between the ends of hits inside of blocks; 0 (default): hits end only where blocks do.
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        held: PrefixLookup,
        most_probes: int = MAX_WINDOW_PROBES,
        has_scratch: bool = False,
        tail_unit: int = 0,
    ) -> None:
        self._groups = groups
        self._held = held
        self._most_probes = most_probes
        self.tails = Tails(groups, held, tail_unit) if tail_unit else None
        """The hits that end inside of a block; None if there are none."""
        self._full = [group for group in groups if group.is_full]
        self.measure = (self._full or groups)[0]
        """The group whose blocks measure the length of a hit: the first full-attention group, if any."""
        self.ends = HitEnds(groups, has_scratch)
        """The positions where hits may end."""
        self._windows = [group for group in groups if group.window_blocks and not group.is_state]
        self._is_sparse = any(group.kept_every is not None for group in groups)
        self._states = [group for group in groups if group.is_state]
        self._least = min(group.offloaded_block_size for group in groups)
        self.tokens_to_leave = max(int(has_scratch), *map(self._recomputes_across_a_border, groups))
        """Tokens at the end of a request that no hit may cover.

        When all of a request is held, the engine recomputes the last token. The last token attends to one token more on
        the left than the token after it. Where that token lies in an earlier block, which the hit does not need, the
        hit must leave at least one token to compute. So it must where a chunk of local attention may begin after the
        last token. A state cannot be computed back by one token either. Scratch
        memory for the last token may have content of the tokens before it.
        """

    def _recomputes_across_a_border(self, group: OffloadGroup) -> bool:
        """Return True if :attr:`tokens_to_leave` must be 1 because of ``group``."""
        if group.is_state or group.kind is GroupKind.CHUNK:
            return True
        if group.sliding_window is None or group.reach >= group.sliding_window:
            return False
        return group.reach % math.gcd(group.gpu_block_size, *self.ends.sizes) == 0

    def first_block(self, group: OffloadGroup, computed: int, end: int) -> int:
        """Return the first offloaded block that a hit of ``end`` tokens needs beyond ``computed`` tokens."""
        size = group.offloaded_block_size
        first = computed // size
        return first if group.is_full else max(first, group.needed_from(end) // size)

    def needed(self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int) -> list[Sequence[OffloadKey]]:
        """Return the keys by group that a hit of ``end`` tokens needs beyond ``computed`` tokens."""
        return [
            group_keys[self.first_block(group, computed, end) : -(-end // group.offloaded_block_size)]
            for group, group_keys in zip(self._groups, keys, strict=True)
        ]

    def longest(self, keys: Sequence[Sequence[OffloadKey]], computed: int, limit: int, ctx: ReqContext) -> Hit:
        """Return the longest usable prefix, in whole blocks.

        With states, the first block of full attention is looked at, without which there is no hit. The search then
        probes the states, from the right: few positions of a request have any. Then it probes the full-attention
        groups, as a prefix from the block of the first uncomputed token, and the windows from the right. A block that
        is missing in a window moves the end to the start of that block, and all windows are probed again. The states
        are probed again at a shorter end. No probe can start a promotion for a hit of less than one block. Windows that
        are stored sparsely often end a hit far before full attention does: then full attention is looked at first, and
        is promoted up to the end that the windows leave.

        Args:
            keys: keys of the request's blocks, by group.
            computed: tokens that the engine has computed.
            limit: largest number of tokens that the hit may cover.
            ctx: the request.

        Returns:
            The hit; it covers at least one block beyond ``computed``, or nothing.
        """
        end = self.ends.last(list(map(len, keys)), limit)
        if self._states:
            return self._with_states(keys, computed, end, ctx)
        return self._attended(keys, computed, end, ctx)

    def _with_states(self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int, ctx: ReqContext) -> Hit:
        """Return the longest usable prefix of at most ``end`` tokens at whose end all states are held."""
        if end - computed < self._least:
            return Hit(computed, False)
        heads = [keys[group.group_idx][computed // group.offloaded_block_size] for group in self._full]
        if False in self._held.lookup_each(heads, ctx):
            return Hit(computed, False)  # one lookup instead of one for each state
        probes, parted_at, ends = self._most_probes, 0, None
        while end - computed >= self._least and probes:
            found, pending = self._probe_states(keys, end, ctx)
            if found:
                hit = self._attended(keys, computed, end, ctx)
                parted_at = max(parted_at, hit.parted_at)
                if hit.tokens == end or hit.pending:
                    return Hit(hit.tokens, pending or hit.pending, parted_at)
                end, ends = self.ends.aligned(hit.tokens), None
            elif pending:
                return Hit(end, True)
            else:
                if ends is None:
                    ends = iter(self._ends_of_states(keys, computed, end, probes - 1, ctx))
                end = next(ends, computed)
            probes -= 1
        return Hit(computed, False, parted_at)

    def _ends_of_states(
        self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int, most: int, ctx: ReqContext
    ) -> list[int]:
        """Return those of up to ``most`` ends before ``end`` whose states may be held, from the right.

        They are looked at in one call, so that a slow tier is waited for once.
        """
        ends = list[int]()
        while len(ends) < most and (end := self.ends.aligned(end - 1)) - computed >= self._least:
            ends.append(end)
        for group in self._states:
            names, size = keys[group.group_idx], group.offloaded_block_size
            answers = self._held.lookup_each([names[end // size - 1] for end in ends], ctx) if ends else ()
            ends = [end for end, answer in zip(ends, answers, strict=True) if answer is not False]
        return ends

    def _probe_states(self, keys: Sequence[Sequence[OffloadKey]], end: int, ctx: ReqContext) -> tuple[bool, bool]:
        """Return True if the states of all groups at ``end`` are held, and True if the answer may change."""
        pending = False
        for group in self._states:
            blocks = end // group.offloaded_block_size
            answer = self._held.match_prefix(keys[group.group_idx][blocks - 1 : blocks], ctx)
            pending = pending or answer.pending
            if not answer.hits:
                return False, answer.pending
        return True, pending

    def _attended(self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int, ctx: ReqContext) -> Hit:
        """Return the longest usable prefix of at most ``end`` tokens, without regard to states."""
        pending, parted_at = False, 0
        if self._is_sparse:
            left, waits = self._left_by_windows(keys, computed, end, ctx)
            if waits:
                return left
            if left.tokens - computed < self._least:
                return Hit(computed, False, left.parted_at)
            end, parted_at = left.tokens, left.parted_at
        for group in self._full:
            if end - computed < self._least:
                return Hit(computed, False)
            size = group.offloaded_block_size
            first = computed // size
            wanted = keys[group.group_idx][first : -(-end // size) + group.lookahead_blocks]
            least = -(-(computed + self._least) // size) - first + group.lookahead_blocks
            answer = self._held.match_prefix(wanted, ctx, at_least=least)
            pending = pending or answer.pending
            if answer.hits < len(wanted):
                end = min(end, self.ends.aligned((first + answer.hits - group.lookahead_blocks) * size))
                if end - computed < self._least:
                    return Hit(computed, answer.pending)
        if end - computed < self._least:
            return Hit(computed, False)
        if not self._windows:
            return Hit(end, pending)
        hit, _ = self._windows_end(keys, computed, end, pending, ctx)
        return Hit(hit.tokens, hit.pending, parted_at or hit.parted_at)

    def _left_by_windows(
        self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int, ctx: ReqContext
    ) -> tuple[Hit, bool]:
        """Return the longest prefix that the windows leave of held full attention, and True if it may change.

        Full attention is not promoted. While a tier is undecided about it, nothing is left out.
        """
        attended = end
        for group in self._full:
            size = group.offloaded_block_size
            first = computed // size
            wanted = keys[group.group_idx][first : -(-attended // size) + group.lookahead_blocks]
            answer = self._held.held(wanted, ctx)
            if answer.pending:
                return Hit(end, False), False
            if answer.hits < len(wanted):
                attended = min(attended, self.ends.aligned((first + answer.hits - group.lookahead_blocks) * size))
        if attended - computed < self._least:
            return Hit(computed, False), False
        return self._windows_end(keys, computed, attended, False, ctx)

    def _windows_end(
        self, keys: Sequence[Sequence[OffloadKey]], computed: int, end: int, pending: bool, ctx: ReqContext
    ) -> tuple[Hit, bool]:
        """Return the longest prefix that the windows leave, and True if one of them is undecided."""
        agreed, turn, probes, attended, undecided = 0, 0, self._most_probes, end, False
        while agreed < len(self._windows):
            if end - computed < self._least or not probes:
                return Hit(computed, pending, attended), False
            group = self._windows[turn % len(self._windows)]
            turn += 1
            size = group.offloaded_block_size
            first = self.first_block(group, computed, end)
            wanted = keys[group.group_idx][first : -(-end // size) + group.lookahead_blocks]
            answer = self._held.match_prefix(wanted, ctx) if wanted else PrefixMatch(0, False)
            pending = pending or answer.pending
            if answer.hits == len(wanted):
                agreed += 1
            elif answer.pending:
                undecided = True
                break
            else:
                held_to = (first + answer.hits - group.lookahead_blocks) * size
                if group.kind is GroupKind.CHUNK:
                    held_to = max(held_to, group.needed_from(end))
                end = self.ends.aligned(min(end - 1, held_to))
                if not answer.hits and group.kind is GroupKind.WINDOW and end > computed:
                    end = self._before_gap(group, keys[group.group_idx], computed, end, ctx)
                agreed, probes = 0, probes - 1
        return Hit(end, pending, attended if end < attended else 0), undecided

    def _before_gap(
        self, group: OffloadGroup, keys: Sequence[OffloadKey], computed: int, end: int, ctx: ReqContext
    ) -> int:
        """Return the last end of a hit before a gap in a window, of at most ``end`` tokens.

        Blocks are looked at from the right, one for each length of the window: any window has one of them. Then those
        behind the first that is held show where its window ends.
        """
        size, step = group.offloaded_block_size, group.window_blocks
        last = -(-end // size) - 1
        places = range(last, computed // size - 1, -step)[: self._most_probes]
        answers = self._held.lookup_each([keys[place] for place in places], ctx)
        place = next((place for place, answer in zip(places, answers, strict=True) if answer is not False), None)
        if place is None:
            return self.ends.aligned(places[-1] * size)
        behind = range(place + 1, min(place + step, last + 1))
        answers = self._held.lookup_each([keys[other] for other in behind], ctx) if behind else ()
        held = next((index for index, answer in enumerate(answers) if answer is False), len(answers))
        return min(end, self.ends.aligned((place + 1 + held) * size))

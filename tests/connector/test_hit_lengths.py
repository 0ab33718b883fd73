"""The longest hit over groups of all kinds, compared with a search that tries every length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import lcm

import pytest

from tiering.api.engine import KVCacheGroup
from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.connector.groups import offload_groups
from tiering.connector.hits import HitSearch
from tiering.connector.tracked import NEVER

FULL, WINDOW, CHUNK, STATE = "full_attention", "sliding_window", "chunked_local_attention", "mamba"
CTX = ReqContext("r1")


class Held(set[OffloadKey]):
    """The blocks that are held."""

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        return PrefixMatch(next((place for place, key in enumerate(keys) if key not in self), len(keys)), False)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool]:
        return [key in self for key in keys]

    def held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixMatch:
        return self.match_prefix(keys, req_context)


def group(kind: str, size: int, window: int | None = None, retained: int = 0) -> KVCacheGroup:
    return KVCacheGroup(("layer",), size, window, kind, retained_tokens=retained)


def names(group_index: int, count: int) -> list[bytes]:
    return [b"%d/%d" % (group_index, block) for block in range(count)]


def longest(
    groups: Sequence[KVCacheGroup],
    held: set[bytes],
    blocks: Sequence[int],
    computed: int,
    limit: int,
    has_scratch: bool = False,
) -> int:
    """Return the hit that the search finds beyond ``computed`` tokens, or ``computed``."""
    search = HitSearch(offload_groups(groups, 1), Held(held), NEVER, has_scratch=has_scratch)
    keys = [names(index, count) for index, count in enumerate(blocks)]
    return max(computed, search.longest(keys, computed, limit, CTX).tokens)


def by_trying(
    groups: Sequence[KVCacheGroup],
    held: set[bytes],
    blocks: Sequence[int],
    computed: int,
    limit: int,
    has_scratch: bool = False,
) -> int:
    """Return the longest hit by the definition of a hit of n tokens."""
    common = [one.gpu_block_size for one in groups if has_scratch or one.kind == STATE]
    ends = [lcm(one.gpu_block_size, *common) for one in groups if one.kind == FULL]

    def is_hit(tokens: int) -> bool:
        for index, (one, count) in enumerate(zip(groups, blocks, strict=True)):
            size = one.gpu_block_size
            last = -(-tokens // size)
            window = one.sliding_window or 1
            seen_from = {WINDOW: max(0, tokens - window + 1), CHUNK: tokens // window * window}
            first = {FULL: 0, STATE: last - 1}.get(one.kind, seen_from.get(one.kind, 0) // size)
            needed = range(max(first, computed // size), last)
            if last > count or not held.issuperset(b"%d/%d" % (index, block) for block in needed):
                return False
        return any(tokens % end == 0 for end in ends)

    least = min(one.gpu_block_size for one in groups)
    return next((tokens for tokens in range(limit, computed + least - 1, -1) if is_hit(tokens)), computed)


@pytest.mark.parametrize(("window", "needed"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_needs_its_last_blocks(window: int, needed: int) -> None:
    groups = (group(FULL, 4), group(WINDOW, 4, window))
    held = {*names(0, 8), *names(1, 8)[8 - needed :]}
    assert longest(groups, held, (8, 8), 0, 32) == 32
    if needed:
        held.remove(b"1/%d" % (8 - needed))
        assert longest(groups, held, (8, 8), 0, 32) < 32


@pytest.mark.parametrize(("end", "needed"), [(32, 0), (28, 3), (20, 1), (16, 0)])
def test_a_chunk_of_local_attention_needs_the_blocks_from_its_begin(end: int, needed: int) -> None:
    groups = (group(FULL, 4), group(CHUNK, 4, 16))
    held = {*names(0, 8), *names(1, 8)[end // 4 - needed : end // 4]}
    assert longest(groups, held, (8, 8), 0, end) == end
    if needed:
        held.remove(b"1/%d" % (end // 4 - needed))
        assert longest(groups, held, (8, 8), 0, end) == 16, "the end of the chunk before needs no block"


def test_a_hit_leaves_a_token_where_a_chunk_may_begin_after_the_last_one() -> None:
    assert HitSearch(offload_groups((group(FULL, 4), group(CHUNK, 4, 16)), 1), Held(), NEVER).tokens_to_leave == 1


def test_beside_scratch_memory_a_hit_ends_at_a_border_of_all_groups_and_leaves_a_token() -> None:
    groups, held = (group(FULL, 4), group(FULL, 12)), {*names(0, 8), *names(1, 3)}
    assert longest(groups, held, (8, 3), 0, 32) == 32, "control: without scratch memory any border will do"
    assert longest(groups, held, (8, 3), 0, 32, has_scratch=True) == 24
    search = [HitSearch(offload_groups(groups, 1), Held(), NEVER, has_scratch=scratch) for scratch in (False, True)]
    assert [one.tokens_to_leave for one in search] == [0, 1]


def test_a_state_needs_only_the_last_block() -> None:
    held = {*names(0, 8), b"1/4"}
    assert longest((group(FULL, 4), group(STATE, 4)), held, (8, 8), 0, 32) == 20


def test_a_hit_ends_where_a_state_was_kept() -> None:
    held = {*names(0, 8), *names(1, 2)}
    assert longest((group(FULL, 4), group(STATE, 12)), held, (8, 2), 0, 31) == 24


def test_a_state_far_before_the_end_is_found() -> None:
    held = {*names(0, 1000), b"1/7"}
    assert longest((group(FULL, 4), group(STATE, 4)), held, (1000, 1000), 0, 4000) == 32


def test_what_an_engine_retains_before_a_window_is_needed_too() -> None:
    """The engine registers the retained blocks as filled."""
    groups = (group(FULL, 4), group(WINDOW, 4, 5, retained=3))
    held = {*names(0, 8), *names(1, 8)[6:]}
    assert longest(groups, held, (8, 8), 0, 32) == 32
    assert offload_groups(groups, 1)[1].skipped_blocks(32) == 6
    held.remove(b"1/6")
    assert longest(groups, held, (8, 8), 0, 32) == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_mixture_finds_what_trying_every_length_finds(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(60):
        groups = [group(FULL, dice.choice([2, 4]))]
        for _ in range(dice.randrange(3)):
            kind = dice.choice([FULL, WINDOW, CHUNK, STATE])
            window = dice.randrange(2, 20) if kind in (WINDOW, CHUNK) else None
            groups.append(group(kind, dice.choice([2, 4, 8]), window))
        dice.shuffle(groups)
        tokens = dice.randrange(1, 70)
        blocks = [tokens // one.gpu_block_size for one in groups]
        share = dice.choice([0.5, 0.8, 0.95, 1.0])
        held = {name for index, count in enumerate(blocks) for name in names(index, count) if dice.random() < share}
        computed = dice.choice([0, 0, dice.randrange(tokens)])
        scratch = dice.random() < 0.2
        expected = by_trying(groups, held, blocks, computed, tokens - 1, scratch)
        assert longest(groups, held, blocks, computed, tokens - 1, scratch) == expected, (groups, held, computed)

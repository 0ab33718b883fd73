"""The longest hit, compared with a search that tries every length."""

from __future__ import annotations

import random

import pytest

from tiering.api.engine import KVCacheGroup
from tiering.simple.hits import HitSearch, needs_of

FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"


def group(kind: str, size: int, window: int | None = None) -> KVCacheGroup:
    return KVCacheGroup(("layer",), size, window, kind)


def search(*groups: KVCacheGroup) -> HitSearch:
    return HitSearch(needs_of(groups, 1))


def names(group_index: int, count: int) -> list[bytes]:
    return [b"%d/%d" % (group_index, block) for block in range(count)]


def by_trying(groups: list[KVCacheGroup], held: list[set[int]], blocks: list[int], computed: int, limit: int) -> int:
    """Return the longest hit by the definition of a hit of n tokens."""

    def is_hit(tokens: int) -> bool:
        for one, have, count in zip(groups, held, blocks, strict=True):
            size = one.gpu_block_size
            if tokens % size or tokens // size > count:
                return False
            first = 0
            if one.kind == STATE:
                first = tokens // size - 1
            elif one.sliding_window is not None:
                first = max(0, tokens - one.sliding_window + 1) // size
            if not set(range(max(first, computed // size), tokens // size)) <= have:
                return False
        return True

    return next((tokens for tokens in range(limit, computed, -1) if is_hit(tokens)), computed)


def test_full_attention_needs_every_block() -> None:
    held = {b"0/0", b"0/1", b"0/3"}
    assert search(group(FULL, 4)).longest([names(0, 4)], 0, 16, held.__contains__) == 8


def test_the_computed_part_is_on_the_gpu_and_need_not_be_held() -> None:
    held = {b"0/2", b"0/3"}
    assert search(group(FULL, 4)).longest([names(0, 4)], 8, 16, held.__contains__) == 16


def test_the_last_token_is_left_by_the_limit() -> None:
    assert search(group(FULL, 4)).longest([names(0, 4)], 0, 15, lambda key: True) == 12


@pytest.mark.parametrize(("window", "needed"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_needs_its_last_blocks(window: int, needed: int) -> None:
    held = {b"0/%d" % block for block in range(8)} | {b"1/%d" % block for block in range(8 - needed, 8)}
    both = search(group(FULL, 4), group(WINDOW, 4, window))
    keys = [names(0, 8), names(1, 8)]
    assert both.longest(keys, 0, 32, held.__contains__) == 32
    if needed:
        held.remove(b"1/%d" % (8 - needed))
        assert both.longest(keys, 0, 32, held.__contains__) < 32


def test_a_state_needs_only_the_last_block() -> None:
    held = {b"0/%d" % block for block in range(8)} | {b"1/4"}
    assert search(group(FULL, 4), group(STATE, 4)).longest([names(0, 8), names(1, 8)], 0, 32, held.__contains__) == 20


def test_a_hit_ends_where_a_block_ends_in_every_group() -> None:
    assert search(group(FULL, 4), group(STATE, 12)).longest([names(0, 8), names(1, 2)], 0, 31, lambda key: True) == 24


def test_no_hit_goes_beyond_the_hashes_of_any_group() -> None:
    assert (
        search(group(FULL, 4), group(WINDOW, 4, 6)).longest([names(0, 8), names(1, 5)], 0, 31, lambda key: True) == 20
    )


def test_a_computed_part_that_ends_within_a_block_gets_nothing() -> None:
    assert search(group(FULL, 4)).longest([names(0, 4)], 6, 16, lambda key: True) == 6


@pytest.mark.parametrize("seed", range(40))
def test_any_mixture_finds_what_trying_every_length_finds(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(60):
        groups = [group(FULL, dice.choice([2, 4]))]
        for _ in range(dice.randrange(3)):
            kind = dice.choice([FULL, WINDOW, STATE])
            groups.append(group(kind, dice.choice([2, 4, 8]), dice.randrange(1, 20) if kind == WINDOW else None))
        dice.shuffle(groups)
        tokens = dice.randrange(1, 70)
        blocks = [tokens // one.gpu_block_size for one in groups]
        share = dice.choice([0.5, 0.8, 0.95, 1.0])
        held = [{block for block in range(count) if dice.random() < share} for count in blocks]
        found = search(*groups)
        computed = dice.choice([0, 0, dice.randrange(tokens) // found.alignment * found.alignment])
        have = {b"%d/%d" % (index, block) for index, some in enumerate(held) for block in some}
        keys = [names(index, count) for index, count in enumerate(blocks)]
        expected = by_trying(groups, held, blocks, computed, tokens - 1)
        assert found.longest(keys, computed, tokens - 1, have.__contains__) == expected, (groups, held, computed)


def test_what_an_engine_retains_before_a_window_is_needed_too() -> None:
    """The engine registers the retained blocks as filled."""
    window = KVCacheGroup(("layer",), 4, 5, WINDOW, retained_tokens=3)
    keys = [names(0, 8), names(1, 8)]
    held = {*keys[0], *keys[1][6:]}
    both = search(group(FULL, 4), window)
    assert both.longest(keys, 0, 32, held.__contains__) == 32
    assert both.needs[1].first_needed(32) == 6
    held.remove(b"1/6")
    assert both.longest(keys, 0, 32, held.__contains__) == 0

"""Blocks that no session needs any more are evicted first, until they are used again."""

from __future__ import annotations

import pytest

from tests.table.test_first_victims import KEYS, evicted, filled, mark, rows
from tiering.api.hints import KeptBlocks
from tiering.table.block_table import BlockTable


def table_of(count: int, policy: str = "lru") -> BlockTable:
    return filled(policy, count)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_released_blocks_go_before_all_others_the_last_one_first(policy: str) -> None:
    table = table_of(6, policy)
    assert table.release([KEYS[3], KEYS[30], KEYS[5]]) == 2
    assert evicted(table, KEYS[10], KEYS[11], KEYS[12]) == [KEYS[5], KEYS[3], KEYS[0]]
    assert table.evictable == 3


def test_a_release_may_leave_kept_blocks_alone() -> None:
    table = table_of(6)
    table.keep(KeptBlocks([KEYS[3]], 60.0, 1.0), lambda: 0.0)
    assert table.release([KEYS[3], KEYS[30], KEYS[5]], kept=False) == 1
    assert evicted(table, KEYS[10], KEYS[11]) == [KEYS[5], KEYS[0]]
    assert table.release([KEYS[3]]) == 1
    assert evicted(table, KEYS[12]) == [KEYS[3]]


def test_released_blocks_go_first_in_an_eviction_ahead_of_need() -> None:
    table = table_of(6)
    table.release([KEYS[4]])
    assert table.evict(2) == [KEYS[4], KEYS[0]]


@pytest.mark.parametrize("use", ["touch", "refresh"])
def test_a_block_that_is_used_again_keeps_its_place(use: str) -> None:
    table = table_of(4)
    table.release([KEYS[2], KEYS[3]])
    getattr(table, use)([KEYS[3]])
    assert evicted(table, KEYS[10], KEYS[11]) == [KEYS[2], KEYS[0]]


def test_a_block_that_is_being_read_goes_first_once_it_has_no_reader() -> None:
    table = table_of(4)
    table.release([KEYS[2]])
    row = rows(table.readable[KEYS[2]])
    table.pin(row)
    assert evicted(table, KEYS[10]) == [KEYS[0]]
    table.unpin(row)
    assert evicted(table, KEYS[11]) == [KEYS[2]]


def test_a_block_that_is_being_written_goes_first_once_it_is_readable() -> None:
    table = table_of(4)
    taken = table.allocate([KEYS[20]])
    assert taken is not None
    assert table.release([KEYS[20]]) == 1
    assert evicted(table, KEYS[10]) == [KEYS[1]]
    table.commit([KEYS[20]], taken[0])
    assert evicted(table, KEYS[11]) == [KEYS[20]]


def test_a_row_that_gets_another_block_is_released_no_more() -> None:
    table = table_of(3)
    table.release([KEYS[1]])
    taken = table.allocate([KEYS[10]])
    assert taken is not None
    assert taken[1] == [KEYS[1]]
    table.commit([KEYS[10]], taken[0])
    assert evicted(table, KEYS[11]) == [KEYS[0]]


def test_blocks_that_nobody_needs_go_before_blocks_that_the_engine_holds() -> None:
    table = filled("lru", 5, set(KEYS))
    mark(table, KEYS[3])
    table.release([KEYS[1]])
    assert evicted(table, KEYS[10], KEYS[11], KEYS[12]) == [KEYS[1], KEYS[3], KEYS[0]]


def test_a_reset_forgets_what_was_released() -> None:
    table = table_of(3)
    table.release(KEYS[:3])
    table.clear()
    for key in KEYS[10:13]:
        taken = table.allocate([key])
        assert taken is not None
        table.commit([key], taken[0])
    assert evicted(table, KEYS[20]) == [KEYS[10]]


def test_a_released_row_that_another_cache_holds_too_is_evicted_once() -> None:
    table = filled("lru", 4, set(KEYS))
    mark(table, KEYS[2])
    table.release([KEYS[2]])
    assert evicted(table, KEYS[10], KEYS[11]) == [KEYS[2], KEYS[0]]
    assert table.evictable == 2

"""The CPU pool: blank, held and evictable blocks, their names, and the events about them."""

from __future__ import annotations

import pytest

from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext
from tiering.errors import ConfigError, TieringError
from tiering.simple.block_pool import CPUBlockPool, PoolFullError
from tiering.simple.metadata import NOT_HELD


def keys(*numbers: int) -> list[bytes]:
    return [b"key%d" % number for number in numbers]


def stored(pool: CPUBlockPool, *numbers: int) -> list[int]:
    """Store these keys and return the blocks, without references."""
    blocks = pool.get_new_blocks(keys(*numbers))
    pool.publish(blocks)
    pool.free_blocks(reversed(blocks))
    return blocks


def test_a_name_is_found_only_once_its_store_is_complete() -> None:
    pool = CPUBlockPool(4)
    (block,) = pool.get_new_blocks(keys(1))
    assert (pool.cached, pool.pending) == ({}, {b"key1": block})
    pool.publish([block])
    assert (pool.cached, pool.pending) == ({b"key1": block}, {})


def test_the_tail_of_what_is_least_recently_used_is_forgotten_first() -> None:
    pool = CPUBlockPool(4)
    stored(pool, 1, 2)
    stored(pool, 3, 4)
    pool.get_new_blocks(keys(5))
    assert sorted(pool.cached) == keys(1, 3, 4)
    assert pool.take_evicted() == keys(2)
    assert pool.take_evicted() == []


def test_blank_blocks_are_taken_before_anything_is_forgotten() -> None:
    pool = CPUBlockPool(3)
    stored(pool, 1)
    pool.get_new_blocks(keys(2, 3))
    assert (list(pool.cached), pool.evictions, pool.num_free_blocks) == (keys(1), 0, 1)


def test_refreshing_a_prefix_leaves_its_head_the_most_recent() -> None:
    pool = CPUBlockPool(4)
    stored(pool, 1, 2)
    stored(pool, 3, 4)
    pool.touch(keys(1, 2, 9), ReqContext("r1"))
    assert list(pool.victims()) == keys(4, 3, 2, 1)


def test_a_held_block_is_never_forgotten() -> None:
    pool = CPUBlockPool(2)
    first, second = stored(pool, 1, 2)
    pool.hold([first])
    assert pool.get_new_blocks(keys(3)) == [second]
    with pytest.raises(PoolFullError):
        pool.get_new_blocks(keys(4))
    assert pool.cached == {b"key1": first}


def test_references_are_counted() -> None:
    pool = CPUBlockPool(1)
    (block,) = stored(pool, 1)
    pool.hold([block])
    pool.hold([block])
    pool.free_blocks([block])
    assert (pool.refs[block], pool.num_free_blocks) == (1, 0)
    pool.free_blocks([block])
    assert (pool.refs[block], pool.num_free_blocks, len(pool.refs)) == (0, 1, 0)


def test_all_or_nothing_when_there_is_no_room() -> None:
    pool = CPUBlockPool(3)
    stored(pool, 1, 2)
    with pytest.raises(PoolFullError) as caught:
        pool.get_new_blocks(keys(3, 4, 5, 6))
    assert caught.value.temporary
    assert (sorted(pool.cached), pool.pending, pool.num_free_blocks) == (keys(1, 2), {}, 3)


def test_a_failed_store_leaves_a_blank_block() -> None:
    pool = CPUBlockPool(1)
    blocks = pool.get_new_blocks(keys(1))
    pool.discard(blocks)
    pool.free_blocks(blocks)
    assert (pool.cached, pool.pending, pool.num_blank_blocks) == ({}, {}, 1)


def test_freeing_what_nobody_holds_is_refused_and_changes_nothing() -> None:
    pool = CPUBlockPool(2)
    block, other = pool.get_new_blocks(keys(1, 2))
    with pytest.raises(TieringError):
        pool.free_blocks([other, block, block])
    assert (pool.refs[block], pool.refs[other]) == (1, 1)


def test_a_reset_forgets_all_names_and_what_copies_hold_becomes_blank_afterwards() -> None:
    pool = CPUBlockPool(3)
    read = stored(pool, 1)
    written = pool.get_new_blocks(keys(2))
    pool.hold(read)
    pool.reset()
    assert (pool.cached, pool.pending, pool.num_free_blocks) == ({}, {}, 1)
    pool.publish(written)
    pool.free_blocks(written + read)
    assert (pool.cached, pool.num_blank_blocks) == ({}, 3)


def test_a_store_from_before_a_reset_does_not_touch_one_of_the_same_name_from_after_it() -> None:
    pool = CPUBlockPool(2)
    old = pool.get_new_blocks(keys(1))
    pool.reset()
    new = pool.get_new_blocks(keys(1))
    pool.discard(old)
    pool.free_blocks(old)
    assert pool.pending == {b"key1": new[0]}
    pool.publish(new)
    assert pool.cached == {b"key1": new[0]}


def test_events_say_what_can_be_found_in_the_order_in_which_it_happened() -> None:
    pool = CPUBlockPool(2, enable_events=True)
    stored(pool, 1, 2)
    stored(pool, 3)
    pool.reset()
    assert pool.take_events() == [
        OffloadingEvent(keys(1, 2), "CPU", "LOCAL", "cpu", removed=False),
        OffloadingEvent(keys(2), "CPU", "LOCAL", "cpu", removed=True),
        OffloadingEvent(keys(3), "CPU", "LOCAL", "cpu", removed=False),
        OffloadingEvent(keys(1, 3), "CPU", "LOCAL", "cpu", removed=True),
    ]
    assert pool.take_events() == []


def test_without_events_none_are_kept() -> None:
    pool = CPUBlockPool(1)
    stored(pool, 1)
    assert pool.take_events() == []


def test_a_number_that_is_no_block_of_the_pool_is_refused() -> None:
    pool = CPUBlockPool(5)
    pool.get_new_blocks(keys(1, 2, 3, 4, 5))
    with pytest.raises(TieringError):
        pool.free_blocks([NOT_HELD])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError):
        CPUBlockPool(0)

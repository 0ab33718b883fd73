"""The table of past blocks: bounded, keyed by a secret, and exact as long as it has room."""

from __future__ import annotations

import random

import numpy as np

from tiering.explain.past_blocks import PastBlocks

RNG = random.Random(7)


def keys(count: int) -> list[bytes]:
    return [RNG.randbytes(36) for _ in range(count)]


def test_a_million_blocks_take_16_megabytes() -> None:
    table = PastBlocks(1_000_000)
    assert sum(array.nbytes for array in (table._hashes, table._info, table._number)) == 16_000_000


def test_the_hashes_of_two_tables_differ() -> None:
    some = keys(100)
    one, other = PastBlocks(1024).hashes(some), PastBlocks(1024).hashes(some)
    assert len(np.unique(one)) == 100
    assert not (one == other).any()


def test_a_hash_depends_on_every_byte_and_not_on_the_other_keys() -> None:
    table, (key,) = PastBlocks(1024), keys(1)
    changed = [key[:at] + bytes((key[at] ^ 1,)) + key[at + 1 :] for at in range(len(key))]
    hashes = table.hashes([key, *changed])
    assert len(np.unique(hashes)) == len(hashes)
    assert table.hashes([key]) == hashes[0]
    swapped = key[4:8] + key[:4] + key[8:]
    assert table.hashes([swapped])[0] != hashes[0]


def test_keys_of_any_length_have_hashes() -> None:
    table = PastBlocks(1024)
    hashes = table.hashes([b"", b"a", b"ab", RNG.randbytes(300)])
    assert len(np.unique(hashes)) == 4
    assert len(table.hashes([])) == 0


def test_each_record_has_what_was_recorded_last() -> None:
    table = PastBlocks(1024)
    a, b, c = (table.hashes([key]) for key in keys(3))
    for block in (a, b, c):
        table.stored(block, 0, 1)
    table.unstored(b, 1, 2)
    table.evicted(np.concatenate([a, b]), 0, 3, 7)
    table.stored(c, 2, 4)
    table.lost(c, 2, 5)
    found = table.find(np.concatenate([a, b, c]))
    assert found.known.all()
    assert found.held.tolist() == [0, 0, 1]
    assert found.removed_from.tolist() == [1, 1, 3]
    assert found.unstored_by.tolist() == [0, 2, 0]
    assert found.lost.tolist() == [False, False, True]
    assert found.time.tolist() == [3, 3, 5]
    assert found.number.tolist()[:2] == [7, 8]


def test_a_tier_that_takes_a_block_later_has_not_declined_it() -> None:
    table = PastBlocks(1024)
    (block,) = (table.hashes([key]) for key in keys(1))
    table.unstored(block, 1, 1)
    table.stored(block, 1, 2)
    table.unstored(block, 1, 3)  # offered again, and held already
    found = table.find(block)
    assert (found.held.tolist(), found.unstored_by.tolist()) == ([2], [0])


def test_a_block_that_is_computed_again_keeps_its_record() -> None:
    table = PastBlocks(1024)
    block = table.hashes(keys(1))
    table.evicted(block, 0, 3, 0)
    table.seen(block, 9)
    assert table.find(block).time.tolist() == [3]


def test_a_removal_of_a_block_that_the_tier_did_not_have_changes_nothing() -> None:
    table = PastBlocks(1024)
    block = table.hashes(keys(1))
    table.lost(block, 1, 1)
    assert not table.find(block).known.any()


def test_the_numbers_of_evictions_wrap() -> None:
    table = PastBlocks(1024)
    blocks = table.hashes(keys(3))
    table.evicted(blocks, 0, 0, (1 << 32) - 1)
    assert table.find(blocks).number.tolist() == [(1 << 32) - 1, 0, 1]


def test_the_table_is_bounded_and_keeps_the_latest_blocks() -> None:
    table = PastBlocks(1024)
    batches = [table.hashes(keys(64)) for _ in range(64)]
    for time, batch in enumerate(batches):
        table.seen(batch, time)
    assert np.count_nonzero(table._hashes) <= 1024
    latest = table.find(np.concatenate(batches[-4:])).known.mean()
    oldest = table.find(np.concatenate(batches[:32])).known.mean()
    assert latest > 0.95
    assert oldest < 0.1


def test_one_batch_may_be_larger_than_the_table() -> None:
    table = PastBlocks(1024)
    table.seen(table.hashes(keys(5000)), 0)
    assert np.count_nonzero(table._hashes) <= 1024


def test_a_cleared_table_knows_nothing() -> None:
    table = PastBlocks(1024)
    block = table.hashes(keys(1))
    table.stored(block, 0, 1)
    table.clear()
    table.seen(block, 0)
    assert table.find(block).held.tolist() == [0]

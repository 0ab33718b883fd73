"""Rows that are evicted first: against a model, and row by row."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tiering.table.block_table import BlockTable
from tiering.testing.keys import keys_of

KEYS = keys_of(*range(40))


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def filled(policy: str, count: int, held: set[bytes] | None = None) -> BlockTable:
    table = BlockTable(count, policy)
    if held is not None:
        table.marks.begin_first_victims(lambda keys: [key in held for key in keys])
    for key in KEYS[:count]:  # one after the other: the first is the least recent
        taken = table.allocate([key])
        assert taken is not None
        table.commit([key], taken[0])
    return table


def evicted(table: BlockTable, *new: bytes) -> list[bytes]:
    taken = table.allocate(list(new))
    assert taken is not None
    return taken[1]


def mark(table: BlockTable, *keys: bytes) -> None:
    table.marks.hold(rows(*(row for row in table.rows_of(keys) if row is not None)))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_marked_rows_go_before_all_others_the_last_one_first(policy: str) -> None:
    table = filled(policy, 6, set(KEYS))
    mark(table, KEYS[3], KEYS[5])
    assert evicted(table, KEYS[10], KEYS[11], KEYS[12]) == [KEYS[5], KEYS[3], KEYS[0]]
    assert table.evictable == 3


def test_a_row_whose_block_has_left_the_other_cache_keeps_its_place() -> None:
    held = set(KEYS)
    table = filled("lru", 4, held)
    mark(table, KEYS[1], KEYS[2])
    held.discard(KEYS[2])
    assert evicted(table, KEYS[10], KEYS[11]) == [KEYS[1], KEYS[0]]
    held.add(KEYS[2])  # the mark is gone: the row is the least recent one now
    mark(table, KEYS[3])
    assert evicted(table, KEYS[12], KEYS[13]) == [KEYS[3], KEYS[2]]


def test_a_pinned_row_is_no_victim_and_the_first_one_again_after_its_last_reader() -> None:
    table = filled("lru", 4, set(KEYS))
    mark(table, KEYS[3])
    row = rows(*filter(None, table.rows_of([KEYS[3]])))
    table.pin(row)
    table.pin(row)
    assert evicted(table, KEYS[10]) == [KEYS[0]]
    table.unpin(row)
    assert evicted(table, KEYS[11]) == [KEYS[1]]
    table.unpin(row)
    assert evicted(table, KEYS[12]) == [KEYS[3]]


def test_a_row_that_is_marked_again_keeps_its_place_and_is_taken_once() -> None:
    table = filled("lru", 4, set(KEYS))
    for _ in range(3):
        mark(table, KEYS[2], KEYS[3], KEYS[1])
        row = rows(*filter(None, table.rows_of([KEYS[2]])))
        table.pin(row)
        table.unpin(row)
    assert evicted(table, *KEYS[10:14]) == [KEYS[1], KEYS[3], KEYS[2], KEYS[0]]


def test_a_mark_ends_with_its_block() -> None:
    table = filled("lru", 4, set(KEYS))
    mark(table, KEYS[1])
    table.drop([KEYS[1]])
    taken = table.allocate([KEYS[10]])
    assert taken is not None
    table.commit([KEYS[10]], taken[0])
    assert evicted(table, KEYS[11]) == [KEYS[0]]
    mark(table, KEYS[2])
    table.clear()
    for key in KEYS[20:23]:  # the row of KEYS[11] is still being written
        taken = table.allocate([key])
        assert taken is not None
        table.commit([key], taken[0])
    assert evicted(table, KEYS[12]) == [KEYS[20]]


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_evicts_a_marked_row_whenever_there_is_one(policy: str, seed: int) -> None:
    rng, held = random.Random(seed), set(KEYS)
    marked: set[bytes] = set()
    pins: list[int] = []
    table = filled(policy, 12, held)
    for _ in range(2000):
        known = [key for key in KEYS if key in table.readable]
        action = rng.randrange(5)
        if action == 0:
            keys = rng.sample(known, rng.randint(1, min(4, len(known))))
            mark(table, *keys)
            marked.update(keys)
        elif action == 1 and len(pins) < 4:
            row = next(iter(table.readable.rows([rng.choice(known)])))
            table.pin(rows(row))
            pins.append(row)
        elif action == 2 and pins:
            table.unpin(rows(pins.pop(rng.randrange(len(pins)))))
        elif action == 3:
            held ^= {rng.choice(KEYS)}
        elif new := [key for key in rng.sample(KEYS, 3) if key not in table.readable]:
            free_of_pins = {key for key in marked if table.rows_of([key])[0] not in pins}
            first = free_of_pins & held
            taken = table.allocate(new)
            if taken is None:
                continue
            assert len(first & set(taken[1])) == min(len(first), len(taken[1]))
            if len(first) < len(taken[1]):
                marked -= free_of_pins  # all were asked for, and those not held have lost their marks
            marked -= set(taken[1])
            # A row may lose its mark before the one that was found; the model follows the table there.
            assert table.marks.first_victims is not None
            marks = table.marks.first_victims._marked
            marked = {key for key in marked if marks[table.rows_of([key])[0]]}
            table.commit(new, taken[0])
        assert table.evictable == int(np.count_nonzero(table.refs == 0))

"""Eviction policies against simple models: exact LRU order with pins, and ARC's adaptation."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from tests.table.looks import known_rows
from tiering.errors import ConfigError
from tiering.table.block_table import BlockTable
from tiering.table.policies.arc import ARCEvictionPolicy
from tiering.table.policies.builtin import load_policy
from tiering.table.policies.policy import EvictionPolicy
from tiering.table.policies.recency import LRUEvictionPolicy


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + b"\0\0\0\0"


def store(table: BlockTable, numbers: list[int]) -> list[bytes]:
    keys = [key(number) for number in numbers]
    taken = table.allocate(keys)
    assert taken is not None
    table.commit(keys, taken[0])
    return taken[1]


def rows(table: BlockTable, numbers: list[int]) -> np.ndarray:
    return np.array([table.readable[key(number)] for number in numbers])


@pytest.mark.parametrize("seed", range(5))
def test_lru_evicts_in_exactly_the_order_of_an_ordered_dict_with_pins(seed: int) -> None:
    rnd = random.Random(seed)
    table = BlockTable(50, "lru")
    model: OrderedDict[int, None] = OrderedDict()
    pins: dict[int, int] = {}
    fresh = iter(range(10**9))
    for _ in range(6000):
        action = rnd.random()
        chosen = rnd.sample(sorted(model), min(len(model), rnd.randint(1, 5)))
        if action < 0.4:
            new = [next(fresh) for _ in range(rnd.randint(1, 4))]
            free = 50 - len(model)
            victims = [number for number in model if not pins.get(number)][: max(0, len(new) - free)]
            if len(new) > free + sum(1 for number in model if not pins.get(number)):
                assert table.allocate([key(number) for number in new]) is None
                continue
            assert store(table, new) == [key(number) for number in victims]
            for number in victims:
                del model[number]
            for number in reversed(new):
                model[number] = None
        elif action < 0.7:
            table.touch([key(number) for number in chosen])
            for number in reversed(chosen):
                model.move_to_end(number)
        elif action < 0.8 and chosen:
            table.pin(rows(table, chosen))
            for number in chosen:
                pins[number] = pins.get(number, 0) + 1
        elif action < 0.97:
            pinned = [number for number in chosen if pins.get(number)]
            if pinned:
                table.unpin(rows(table, pinned))
                for number in pinned:
                    pins[number] -= 1
        elif chosen:
            idle = [number for number in chosen if not pins.get(number)]
            assert table.drop([key(number) for number in idle]) == [key(number) for number in idle]
            for number in idle:
                del model[number]
        order = [int.from_bytes(table.keys[row][:8], "big") for row in known_rows(table)]
        assert order == list(reversed(model))
        assert table.evictable == sum(1 for number in model if not pins.get(number))


def test_the_log_stays_within_a_few_times_the_rows_however_often_they_are_touched() -> None:
    table = BlockTable(10_000, "lru")
    store(table, list(range(10_000)))
    for start in range(0, 500_000, 500):
        table.touch([key((start + offset) * 7919 % 10_000) for offset in range(500)])
    policy = table.policy
    assert isinstance(policy, LRUEvictionPolicy)
    assert sum(chunk.end - chunk.start for chunk in policy._log._chunks) < 3 * 10_000 + 2 * 4096
    assert len(known_rows(table)) == 10_000


def test_arc_keeps_what_is_used_often_through_a_scan_that_flushes_lru() -> None:
    survivors = {}
    for name in ("lru", "arc"):
        table = BlockTable(100, name)
        hot = list(range(40))
        store(table, hot)
        table.touch([key(number) for number in hot])
        for start in range(1000, 2000, 10):
            store(table, list(range(start, start + 10)))
        survivors[name] = sum(key(number) in table.readable for number in hot)
    assert survivors == {"lru": 0, "arc": 40}


def test_arc_grows_t1_when_a_recently_evicted_key_returns() -> None:
    table = BlockTable(10, "arc")
    policy = table.policy
    assert isinstance(policy, ARCEvictionPolicy)
    store(table, [0, 1, 2, 3, 4])
    table.touch([key(number) for number in range(5)])
    store(table, [10, 11, 12, 13, 14])
    evicted = store(table, [20, 21])
    assert policy.target == 0
    returned = int.from_bytes(evicted[0][:8], "big")
    store(table, [returned])
    assert policy.target >= 1


@pytest.mark.parametrize("name", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_keeps_the_table_whole_under_random_use(name: str, seed: int) -> None:
    rnd = random.Random(seed)
    table = BlockTable(64, name)
    pinned: list[int] = []
    for step in range(4000):
        numbers = rnd.sample(range(200), 4)
        new = [number for number in numbers if key(number) not in table.readable]
        if rnd.random() < 0.5 and new and len(new) <= table.room:
            store(table, new)
        else:
            table.touch([key(number) for number in numbers])
        known = [number for number in numbers if key(number) in table.readable and number not in pinned]
        if known and rnd.random() < 0.3 and len(pinned) < 40:
            table.pin(rows(table, known))
            pinned += known
        elif pinned and rnd.random() < 0.4:
            leaving = pinned[: rnd.randint(1, 6)]
            table.unpin(rows(table, leaving))
            del pinned[: len(leaving)]
        if step % 500 == 499:
            unpinned = table.evictable
            assert unpinned == len(table.readable) - len(pinned)
            assert len(table.readable) + table.free == 64
        assert sorted(table.readable.values()) == sorted(known_rows(table))
        assert all(key(number) in table.readable for number in pinned)


def test_a_policy_of_ones_own_is_named_module_class() -> None:
    assert load_policy("tiering.table.policies.arc:ARCEvictionPolicy") is ARCEvictionPolicy
    assert issubclass(load_policy("lru"), EvictionPolicy)


@pytest.mark.parametrize(
    "name", ["mru", "no.such.module:Class", "tiering.table.policies.arc:Nothing", "collections:OrderedDict"]
)
def test_an_unknown_policy_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="eviction"):
        load_policy(name)


def test_keys_that_end_in_zero_bytes_come_back_whole() -> None:
    table = BlockTable(2)
    store(table, [0, 256])
    assert store(table, [1]) == [key(256)]
    assert table.evict(2) == [key(0), key(1)]


def test_a_refresh_renews_rows_of_arc_without_counting_a_use() -> None:
    table = BlockTable(10, "arc")
    store(table, [0, 1, 2, 3, 4])
    table.touch([key(0), key(1)])
    store(table, [5, 6, 7, 8, 9])
    known, rows = table.refresh([key(number) for number in (1, 2, 3, 99)])
    assert len(known) == len(rows) == 3
    order = [int.from_bytes(table.keys[row][:8], "big") for row in known_rows(table)]
    assert order == [1, 0, 2, 3, 5, 6, 7, 8, 9, 4]
    assert [int.from_bytes(name[:8], "big") for name in store(table, list(range(20, 27)))] == [4, 9, 8, 7, 6, 5, 3]

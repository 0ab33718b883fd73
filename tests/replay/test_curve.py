"""The curve of one LRU cache: exact for a full trace, close for a sample."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from tiering.advisor.shards import Shards
from tiering.replay.trace import mixed


def lru_hits(keys: list[int], capacity: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in keys:
        hits += key in held
        held[key] = None
        held.move_to_end(key)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def accesses(count: int, distinct: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return accesses to a few frequent keys and many rare ones."""
    chosen = (np.random.default_rng(seed).pareto(0.7, count) * 10).astype(np.uint64) % np.uint64(distinct)
    return mixed(chosen)


def test_the_curve_of_lru_is_exact_while_all_keys_are_sampled() -> None:
    keys = accesses(20_000, 3000)
    capacities = [10, 100, 1000, 2000]
    cache = Shards(capacities, 1 << 16)
    for start in range(0, len(keys), 50):
        cache.add(keys[start : start + 50])
    for capacity in capacities:
        assert cache.hit_rate(capacity) == pytest.approx(lru_hits(keys.tolist(), capacity) / len(keys), abs=1e-9)
    assert cache.distinct == len(np.unique(keys))
    assert cache.reuse == 1 - len(np.unique(keys)) / len(keys)


def test_a_curve_from_a_sample_is_close_to_that_of_all_accesses() -> None:
    keys = accesses(60_000, 20_000)
    capacities = [500, 2000, 8000]
    exact, sampled = Shards(capacities, 1 << 16), Shards(capacities, 4096)
    for start in range(0, len(keys), 100):
        exact.add(keys[start : start + 100])
        sampled.add(keys[start : start + 100])
    assert sampled.distinct == pytest.approx(exact.distinct, rel=0.05)
    assert sampled.reuse == pytest.approx(exact.reuse, abs=0.02)
    for capacity in capacities:
        assert sampled.hit_rate(capacity) == pytest.approx(exact.hit_rate(capacity), abs=0.03)

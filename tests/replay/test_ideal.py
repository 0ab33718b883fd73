"""The bounds of hit rates: exact for a full trace, close for a sample."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache

import numpy as np
import pytest

from tiering.replay.ideal import Bounds, optimal_hits
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


def best_hits(keys: list[int], capacity: int) -> int:
    """Return the hits of the best policy, by trying all of them."""

    @cache
    def best(position: int, held: frozenset[int]) -> int:
        if position == len(keys):
            return 0
        key = keys[position]
        choices = [held | {key}] if len(held | {key}) <= capacity else []
        if not choices:
            choices = [held, *((held - {victim}) | {key} for victim in held)]
        return (key in held) + max(best(position + 1, choice) for choice in choices)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_the_best_of_all_policies(seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 5, 14)
    for capacity in (1, 2, 3):
        assert optimal_hits(keys.astype(np.uint64), capacity) == best_hits(keys.tolist(), capacity)


def accesses(count: int, distinct: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return accesses to a few frequent keys and many rare ones."""
    chosen = (np.random.default_rng(seed).pareto(0.7, count) * 10).astype(np.uint64) % np.uint64(distinct)
    return mixed(chosen)


def test_the_curve_of_lru_is_exact_while_all_keys_are_sampled() -> None:
    keys = accesses(20_000, 3000)
    capacities = [10, 100, 1000, 2000]
    bounds = Bounds(capacities)
    for start in range(0, len(keys), 50):
        bounds.add(keys[start : start + 50])
    for capacity in capacities:
        assert bounds.lru(capacity) == pytest.approx(lru_hits(keys.tolist(), capacity) / len(keys), abs=1e-9)
    assert bounds.distinct == len(np.unique(keys))
    assert bounds.reuse == 1 - len(np.unique(keys)) / len(keys)
    assert bounds.ideal(np.inf) == bounds.reuse


def test_the_optimum_of_a_sample_is_close_to_that_of_all() -> None:
    keys = accesses(60_000, 20_000)
    exact, sampled = Bounds([1]), Bounds([1], max_accesses=20_000)
    for start in range(0, len(keys), 100):
        exact.add(keys[start : start + 100])
        sampled.add(keys[start : start + 100])
    assert sampled.distinct == pytest.approx(exact.distinct, rel=0.1)
    for capacity in (500, 2000, 8000):
        assert sampled.ideal(capacity) == pytest.approx(exact.ideal(capacity), abs=0.06)

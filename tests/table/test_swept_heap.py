"""Heaps that drop what has become void while they wait, a little with each call."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from tiering.table.swept_heap import FEW, LOOKS, MOST_LISTED, Members, SweptHeap


class Numbers:
    """The present number of each member, and the looks at them."""

    def __init__(self, members: int) -> None:
        self.of = np.full(members, np.inf)
        self.looks = 0

    def valid(self, number: float, members: Members) -> NDArray[np.bool_]:
        """Return a mask of the members that have a number now."""
        self.looks += 1 + len(members)
        mask: NDArray[np.bool_] = self.of[members] == number
        return mask


def test_random_lives_give_every_member_at_its_last_number_and_never_long_calls() -> None:
    for seed in range(30):
        rng, numbers = random.Random(seed), Numbers(60)
        heap = SweptHeap(numbers.valid)
        for order in range(2000):
            if rng.random() < 0.1 and heap.first is not None:
                smallest = heap.first
                number, _, members, listed = heap.pop()
                assert number == smallest <= numbers.of.min()
                assert listed >= len(members)
                numbers.of[members] = np.inf
                continue
            chosen = np.array(rng.sample(range(60), rng.randrange(1, 6)))
            number = float(rng.randrange(1000)) + order / 1000
            numbers.of[chosen] = number
            numbers.looks = 0
            live = int(np.isfinite(numbers.of).sum())
            heap.push(number, order, chosen, live)
            assert numbers.looks <= LOOKS * (1 + len(chosen)) + 6
            assert heap.listed == sum(len(members) for _, _, members in heap._newer + heap._older)
            assert heap.listed <= FEW + (MOST_LISTED + 1) * 60
        found = []
        while heap.first is not None:
            number, _, members, _ = heap.pop()
            assert (numbers.of[members] == number).all()
            found += members.tolist()
        assert sorted(found) == np.flatnonzero(np.isfinite(numbers.of)).tolist()


def test_an_entry_without_members_is_none() -> None:
    heap = SweptHeap(Numbers(1).valid)
    heap.push(1.0, 0, np.zeros(0, np.int64), 1)
    assert heap.first is None
    assert len(heap) == 0

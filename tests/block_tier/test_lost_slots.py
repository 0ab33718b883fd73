"""Slots that the medium loses while they are in use: no slot is used twice, whatever the order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tiering.api.keys import OffloadKey
from tiering.index.slots import SlotIndex
from tiering.medium.block_store import Place
from tiering.testing.keys import keys_of

SLOTS = 24
SEGMENT = 8
"""Number of slots that are lost together."""


def test_a_block_that_is_stored_again_after_the_loss_of_its_slot_may_lose_the_new_slot_too() -> None:
    index, (key,) = SlotIndex(SLOTS), keys_of(0)
    index.add_free(np.arange(SLOTS))
    first = index.plan_store([key], 0.0)
    (slot,) = first.places
    assert isinstance(slot, int)
    index.states.fail(slot // SEGMENT * SEGMENT, slot // SEGMENT * SEGMENT + SEGMENT)
    second = index.plan_store([key], 1.0)
    assert second.places not in ([], first.places)
    index.states.fail(0, SLOTS)
    for plan in (first, second):
        index.end_store([key], plan.places, [True], 2.0)
    assert (list(index.held), index.slots, index.states.leaving) == ([], 0, set())


@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_no_slot_in_use_and_no_lost_slot_is_given_away(first_seed: int, eviction: str) -> None:
    for seed in range(first_seed, first_seed + 20):
        walk(random.Random(seed), eviction)


def begin_load(index: SlotIndex, keys: list[OffloadKey]) -> list[Place]:
    """Begin a load of blocks that are held, and return their slots."""
    places = [place for place in index.begin_load(keys) if place is not None]
    assert len(places) == len(keys)
    return places


def walk(dice: random.Random, eviction: str) -> None:
    """Store, load, lose slots and get new ones in random order; compare the index with a model each time."""
    index = SlotIndex(SLOTS, eviction=eviction)
    index.add_free(np.arange(SLOTS))
    lost: set[int] = set()
    stores: list[tuple[list[OffloadKey], list[Place]]] = []
    loads: list[tuple[list[OffloadKey], list[Place]]] = []
    for step in range(300):
        keys = keys_of(*{dice.randrange(40) for _ in range(dice.randint(1, 5))})
        busy = {place for _, places in [*stores, *loads] for place in places}
        match dice.randrange(9):
            case 0 | 1:
                plan = index.plan_store(keys, step)
                assert busy.isdisjoint(plan.places)
                assert lost.isdisjoint(plan.places)
                stores.append(([keys[position] for position in plan.positions], list(plan.places)))
            case 2 if stores:
                written, slots = stores.pop(dice.randrange(len(stores)))
                index.end_store(written, slots, [dice.random() < 0.8 for _ in written], step)
            case 3:
                held = [key for key in keys if key in index.held]
                loads.append((held, begin_load(index, held)))
            case 4 if loads:
                read, places = loads.pop(dice.randrange(len(loads)))
                index.end_load(read, places, [dice.random() < 0.2 for _ in read], step)
            case 5:
                start = dice.randrange(0, SLOTS, SEGMENT)
                start, stop = (0, SLOTS) if dice.random() < 0.3 else (start, start + SEGMENT)
                index.states.fail(start, stop)
                lost.update(range(start, stop))
            case 6:
                back = sorted(slot for slot in lost - index.states.leaving if slot not in busy)
                index.add_free(np.array(back, np.int64))
                lost.difference_update(back)
            case 7:
                index.touch(keys)
        assert lost.isdisjoint(np.flatnonzero(index.states.is_foreign).tolist())
        for key in index.held:
            places = begin_load(index, [key])
            assert lost.isdisjoint(places)
            index.end_load([key], places, [False], step)
        assert index.slots <= SLOTS - len(lost - index.states.leaving)

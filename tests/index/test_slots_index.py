"""The index of slots: placement, eviction, answers, and recovered blocks."""

from __future__ import annotations

import math
import random
from itertools import chain, pairwise

import numpy as np
import pytest

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.index.slots import EVICT_AT_ONCE, SlotIndex
from tiering.index.tier_index import StorePlan
from tiering.testing.keys import key_of

NOW = 0.0
K = [key_of(number) for number in range(256)]


def make_index(slots: int = 8, **options: float) -> SlotIndex:
    index = SlotIndex(slots, **options)  # type: ignore[arg-type]
    index.add_free(np.arange(slots))
    return index


def store(index: SlotIndex, keys: list[OffloadKey]) -> StorePlan:
    plan = index.plan_store(keys, NOW)
    chosen = [keys[position] for position in plan.positions]
    index.end_store(chosen, plan.places, [True] * len(chosen), NOW)
    return plan


def held(index: SlotIndex, keys: list[OffloadKey]) -> list[OffloadKey]:
    return [key for key in keys if index.lookup_prefix([key], NOW).held]


def sequences(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(numbers, np.uint64)


# -------------------------------------------------------------------------------------------------------------- lookups


def test_a_lookup_counts_the_leading_keys_that_are_held() -> None:
    index = make_index()
    store(index, K[:4])
    assert index.lookup_prefix(K[:4], NOW) == (4, False)
    assert index.lookup_prefix([*K[:2], K[9], K[3]], NOW) == (2, False)
    assert index.lookup_prefix([K[9]], NOW) == (0, False)
    assert index.lookup_prefix([], NOW) == (0, False)


def test_a_block_being_written_is_not_answered_for() -> None:
    index = make_index()
    plan = index.plan_store(K[:2], NOW)
    assert index.lookup_prefix(K[:2], NOW) == (0, False)
    index.end_store(K[:2], plan.places, [True, True], NOW)
    assert index.lookup_prefix(K[:2], NOW) == (2, False)


# --------------------------------------------------------------------------------------------------------------- stores


def test_a_batch_gets_neighbouring_slots_in_its_order() -> None:
    index = make_index(64)
    plan = store(index, K[:16])
    first = plan.places[0]
    assert isinstance(first, int)
    assert plan.places == list(range(first, first + 16))


def test_slots_of_blocks_evicted_together_are_neighbours_again() -> None:
    index = make_index(64)
    for start in range(0, 64, 16):
        store(index, K[start : start + 16])
    places = [place for place in store(index, K[100:116]).places if isinstance(place, int)]
    assert all(after == before + 1 for before, after in pairwise(places))


def test_what_is_held_or_being_written_is_not_written_again() -> None:
    index = make_index()
    store(index, K[:2])
    index.plan_store([K[2]], NOW)
    plan = index.plan_store(K[:4], NOW)
    assert plan.already_held == [0, 1]
    assert plan.positions == [3]


def test_the_least_recently_used_block_makes_room() -> None:
    index = make_index(4)
    store(index, K[:4])
    index.touch([K[3], K[2]])
    plan = store(index, K[4:6])
    assert sorted(plan.evicted) == sorted(K[:2])
    assert held(index, K[:6]) == K[2:6]


def test_released_blocks_make_room_first_until_they_are_used_again() -> None:
    index = make_index(4)
    store(index, K[:4])
    index.release([K[2], K[3]])
    index.touch([K[3]])
    plan = store(index, K[4:6])
    assert len(plan.evicted) == 2
    assert K[2] in plan.evicted
    assert K[3] not in plan.evicted


def test_others_make_room_before_kept_blocks() -> None:
    index = make_index(4)
    store(index, K[:4])
    index.touch(K[:2])
    index.keep(KeptBlocks(K[2:4], 10.0, 0.5), lambda: 0.0)
    assert set(store(index, K[4:6]).evicted) == set(K[:2])


def test_a_held_key_of_the_same_call_is_not_evicted_for_its_neighbours() -> None:
    index = make_index(4)
    store(index, K[:4])
    plan = store(index, [K[0], K[1], K[10], K[11], K[12]])
    assert plan.already_held == [0, 1]
    assert plan.positions == [2, 3]
    assert held(index, [K[0], K[1], K[10], K[11], K[12]]) == [K[0], K[1], K[10], K[11]]


def test_blocks_without_room_are_declined_from_the_tail() -> None:
    index = make_index(4)
    index.plan_store(K[:3], NOW)
    assert index.plan_store(K[4:8], NOW).positions == [0]


def test_a_failed_write_frees_its_slot_and_holds_nothing() -> None:
    index = make_index(2)
    plan = index.plan_store(K[:2], NOW)
    index.end_store(K[:2], plan.places, [True, False], NOW)
    assert held(index, K[:2]) == [K[0]]
    assert index.free == 1


def test_eviction_begins_at_the_high_watermark_and_ends_at_the_low_one() -> None:
    index = make_index(100, high_watermark=0.9, low_watermark=0.5)
    assert store(index, K[:90]).evicted == []
    plan = store(index, [K[90]])
    assert len(plan.evicted) == 41
    assert index.blocks == 50


def test_a_large_medium_is_evicted_in_bounded_pieces() -> None:
    """The scheduler waits for an eviction, and a million blocks may lie between the watermarks."""
    keys = [key_of(number) for number in range(3 * EVICT_AT_ONCE + 64)]
    index = make_index(3 * EVICT_AT_ONCE, high_watermark=1.0, low_watermark=0.25)
    store(index, keys[: 3 * EVICT_AT_ONCE])
    pieces = [len(store(index, [key]).evicted) for key in keys[3 * EVICT_AT_ONCE :]]
    assert pieces[:2] == [EVICT_AT_ONCE] * 2
    assert 0 < pieces[2] < EVICT_AT_ONCE
    assert not any(pieces[3:])
    assert index.blocks == 3 * EVICT_AT_ONCE // 4 + len(pieces) - 3


# ---------------------------------------------------------------------------------------------------------------- loads


def test_a_slot_that_is_read_is_not_reused() -> None:
    index = make_index(2)
    places = store(index, K[:2]).places
    assert index.begin_load([K[0], K[9]]) == [places[0], None]
    plan = store(index, K[2:4])
    assert plan.evicted == [K[1]]
    assert plan.places == [places[1]]
    index.end_load([K[0]], [places[0]], [False], NOW)
    assert store(index, K[4:6]).positions == [0, 1]


def test_a_block_that_was_lost_leaves_the_index() -> None:
    index = make_index(4)
    store(index, K[:2])
    places = [place for place in index.begin_load(K[:2]) if place is not None]
    assert index.end_load(K[:2], places, [True, False], NOW) == [K[0]]
    assert held(index, K[:2]) == [K[1]]
    assert index.free == 3


def test_a_lost_block_that_another_job_still_reads_keeps_its_slot_until_then() -> None:
    index = make_index(1)
    place = store(index, K[:1]).places
    index.begin_load(K[:1])
    index.begin_load(K[:1])
    index.end_load(K[:1], place, [True], NOW)
    assert index.plan_store([K[1]], NOW).positions == []
    index.end_load(K[:1], place, [False], NOW)
    assert index.plan_store([K[1]], NOW).positions == [0]


# ---------------------------------------------------------------------------------------------------------------- reset


def test_a_reset_forgets_everything_and_frees_what_is_idle() -> None:
    index = make_index(4)
    store(index, K[:3])
    assert sorted(chain.from_iterable(index.clear())) == sorted(K[:3])
    assert held(index, K[:3]) == []
    assert index.free == 4


def test_a_write_that_ends_after_a_reset_frees_its_slot_and_holds_nothing() -> None:
    index = make_index(2)
    before = index.plan_store([K[0]], NOW)
    index.clear()
    after = index.plan_store([K[0]], NOW)
    assert after.places != before.places
    index.end_store([K[0]], before.places, [True], NOW)
    assert held(index, K[:1]) == []
    index.end_store([K[0]], after.places, [True], NOW)
    assert held(index, K[:1]) == [K[0]]
    assert index.free == 1


def test_a_read_that_ends_after_a_reset_frees_its_slot_only_then() -> None:
    index = make_index(1)
    places = store(index, K[:1]).places
    index.begin_load(K[:1])
    index.clear()
    assert index.plan_store([K[1]], NOW).positions == []
    index.end_load(K[:1], places, [False], NOW)
    assert index.plan_store([K[1]], NOW).positions == [0]


# --------------------------------------------------------------------------------------------------- unseen and foreign


def test_unseen_slots_are_neither_allocated_nor_answered_for() -> None:
    index = SlotIndex(8)
    assert index.plan_store(K[:2], NOW).positions == []
    index.add_free(np.array([5]))
    assert store(index, K[:2]).places == [5]


def test_foreign_blocks_go_before_our_own_and_after_free_slots() -> None:
    index = SlotIndex(4)
    index.add_free(np.array([0]))
    index.states.add_foreign(np.array([1, 2]))
    assert store(index, [K[0]]).places == [0]
    plan = store(index, K[1:3])
    assert plan.evicted == []
    assert sorted(plan.places, key=int) == [1, 2]
    assert store(index, [K[3]]).evicted == [K[0]]


# ------------------------------------------------------------------------------------------------------------- recovery


def test_recovered_blocks_are_held_the_last_merged_most_recently_used() -> None:
    index = SlotIndex(4)
    index.begin_recovery()
    assert index.merge(K[:2], np.array([0, 1]), sequences(1, 2)) == K[:2]
    index.merge(K[2:4], np.array([2, 3]), sequences(3, 4))
    index.end_recovery()
    assert index.lookup_prefix(K[:4], NOW).held == 4
    assert store(index, [K[9]]).evicted == [K[1]]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_slots_with_one_key_the_higher_sequence_wins(order: tuple[int, int]) -> None:
    index = SlotIndex(4)
    index.begin_recovery()
    for slot, sequence in enumerate(order):
        index.merge([K[0]], np.array([slot]), sequences(sequence))
    assert index.begin_load([K[0]]) == [order.index(2)]
    assert index.slots == 2
    assert index.free == 1


def test_what_was_written_since_the_start_wins_over_what_is_recovered() -> None:
    index = SlotIndex(5)
    index.begin_recovery()
    index.add_free(np.array([0, 1]))
    (written,) = store(index, [K[0]]).places
    writing = index.plan_store([K[1]], NOW).places
    assert index.merge(K[:3], np.array([2, 3, 4]), sequences(9, 9, 9)) == [K[2]]
    assert index.begin_load([K[0]]) == [written]
    index.end_store([K[1]], writing, [True], NOW)
    assert index.begin_load([K[1]]) == writing


def test_a_replaced_slot_that_is_being_read_is_free_only_afterwards() -> None:
    index = SlotIndex(2)
    index.begin_recovery()
    index.merge([K[0]], np.array([0]), sequences(1))
    index.begin_load([K[0]])
    index.merge([K[0]], np.array([1]), sequences(2))
    assert index.free == 0
    index.end_load([K[0]], [0], [False], NOW)
    assert index.free == 1
    assert index.begin_load([K[0]]) == [1]


# ------------------------------------------------------------------------------------------------------------ bad slots


def test_a_bad_slot_that_is_written_is_out_of_use_when_its_writer_has_ended_and_its_block_does_not_count() -> None:
    index = make_index(2)
    plan = index.plan_store(K[:2], NOW)
    bad = plan.places[0]
    assert isinstance(bad, int)
    assert index.retire([bad]) == []
    assert set(index.states.revoked) == {bad}
    assert index.states.idle_bad([bad]) == [], "a trial would write beside the writer"
    index.end_store(K[:2], plan.places, [True, True], NOW)
    assert index.states.idle_bad([bad]) == [bad]
    assert (index.lookup_prefix(K[1:2], NOW).held, index.blocks, index.slots) == (1, 1, 1)
    index.states.restore([bad])
    assert (index.slots, index.free, index.retired_for_errors) == (2, 1, 0)


def test_bad_slots_known_from_before_are_never_handed_out_when_they_are_seen() -> None:
    index = SlotIndex(6)
    index.states.mark_bad([1, 3, 5])
    index.begin_recovery()
    index.add_free(np.array([0, 1]))
    index.states.add_foreign(np.array([2, 3]))
    assert index.merge(K[:2], np.array([4, 5]), np.array([7, 8], np.uint64)) == K[:1]
    index.end_recovery()
    assert (index.slots, index.free, index.blocks, index.retired_for_errors) == (3, 2, 1, 3)
    assert sorted(index.states.idle_bad(range(6))) == [1, 3, 5]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_slice_says_what_is_held_written_and_foreign() -> None:
    index = SlotIndex(6)
    index.add_free(np.array([0, 1, 2]))
    index.states.add_foreign(np.array([4]))
    store(index, [K[0]])
    index.plan_store([K[1]], NOW)
    part = index.slice(0, 6)
    assert part.keys[0] == K[0]
    assert part.written.tolist() == [False, True, False, False, False, False]
    assert part.foreign.tolist() == [False, False, False, False, True, False]
    store(index, [K[2]])
    assert part.keys[2] is None, "a slice does not change afterwards"


def test_a_slice_leaves_out_blocks_that_a_reset_forgot_while_they_were_read() -> None:
    index = make_index(2)
    store(index, K[:1])
    index.begin_load(K[:1])
    index.clear()
    assert list(index.slice(0, 2).keys) == [None, None]


# --------------------------------------------------------------------------------------------------------- all together


@pytest.mark.parametrize("seed", range(20))
def test_at_random_every_slot_has_one_owner_and_answers_are_those_of_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    index = make_index(24, high_watermark=rng.choice([1.0, 0.8]), low_watermark=rng.choice([0.8, 0.5]))
    model: dict[OffloadKey, object] = {}
    writes: list[tuple[list[OffloadKey], list[object]]] = []
    reads: list[tuple[list[OffloadKey], list[object]]] = []
    reading: set[object] = set()
    for _ in range(400):
        action = rng.randrange(6)
        if action == 0:
            keys = rng.sample(K[:64], rng.randint(1, 8))
            plan = index.plan_store(keys, NOW)
            for key in plan.evicted:
                del model[key]
            busy = set(model.values()) | {place for _, places in writes for place in places} | reading
            assert busy.isdisjoint(plan.places), seed
            writes.append(([keys[position] for position in plan.positions], list(plan.places)))
        elif action == 1 and writes:
            keys, places = writes.pop(rng.randrange(len(writes)))
            stored = [rng.random() < 0.8 for _ in keys]
            index.end_store(keys, places, stored, NOW)  # type: ignore[arg-type]
            model.update({key: place for key, place, good in zip(keys, places, stored, strict=True) if good})
        elif action == 2 and model:
            keys = rng.sample(sorted(model), rng.randint(1, min(4, len(model))))
            places = list(index.begin_load(keys))
            assert places == [model[key] for key in keys], seed
            reads.append((keys, places))
            reading.update(places)
        elif action == 3 and reads:
            keys, places = reads.pop(rng.randrange(len(reads)))
            lost = [rng.random() < 0.2 for _ in keys]
            for key in index.end_load(keys, places, lost, NOW):  # type: ignore[arg-type]
                del model[key]
            reading = {place for _, others in reads for place in others}
        elif action == 4:
            index.touch(rng.sample(K[:64], 5))
        elif rng.random() < 0.05:
            # Jobs in flight across a reset end, and their blocks are not held.
            assert sorted(chain.from_iterable(index.clear())) == sorted(model), seed
            model.clear()
            for keys, places in writes:
                index.end_store(keys, places, [True] * len(keys), NOW)  # type: ignore[arg-type]
            for keys, places in reads:
                index.end_load(keys, places, [False] * len(keys), NOW)  # type: ignore[arg-type]
            writes, reads, reading = [], [], set()
            assert index.free == index.slots, seed
        assert index.blocks == len(model), seed
        assert held(index, K[:64]) == [key for key in K[:64] if key in model], seed


# --------------------------------------------------------------------------------------------------------------- losses


def test_lost_slots_are_unseen_and_can_come_back() -> None:
    index = make_index(8)
    store(index, K[:6])
    assert set(index.states.fail(0, 4)) == set(K[:4])
    assert held(index, K[:6]) == K[4:6]
    assert (index.slots, index.free, index.blocks) == (4, 2, 2)
    assert store(index, K[10:20]).places == [6, 7, 5, 4] or index.slots == 4
    index.add_free(np.arange(4))
    assert (index.slots, index.states.leaving) == (8, set())
    assert len(store(index, K[20:24]).places) == 4


def test_what_is_written_to_a_lost_slot_does_not_count_and_the_slot_waits_for_its_writer() -> None:
    index = make_index(8)
    plan = index.plan_store(K[:2], NOW)
    assert index.states.fail(0, 4) == []
    assert index.states.leaving == {0, 1}
    index.end_store(K[:2], plan.places, [False, False], NOW)
    assert (index.states.leaving, index.slots) == (set(), 4)
    assert held(index, K[:2]) == []
    index.add_free(np.arange(4))
    assert sorted(store(index, K[8:16]).places) == list(range(8))


def test_a_lost_slot_that_is_read_waits_for_its_reader() -> None:
    index = make_index(4)
    store(index, K[:4])
    places = index.begin_load(K[:1])
    assert set(index.states.fail(0, 4)) == set(K[:4])
    assert index.states.leaving == {0}
    assert index.end_load(K[:1], [0], [True], NOW) == []
    assert places == [0]
    assert (index.states.leaving, index.slots, index.free) == (set(), 0, 0)


def test_slots_out_of_use_foreign_or_on_trial_are_lost_with_the_others() -> None:
    index = SlotIndex(8)
    index.add_free(np.arange(6))
    index.states.add_foreign(np.arange(6, 8))
    index.retire([1])
    trial = index.borrow(2)
    assert index.states.fail(0, 8) == []
    assert index.states.leaving == set(trial)
    index.give_back()
    assert (index.states.leaving, index.slots, index.free) == (set(), 0, 0)
    index.add_free(np.arange(8))
    assert (index.slots, index.free, index.retired_for_errors) == (8, 8, 0), (
        "a new segment lies elsewhere on the device"
    )


# ------------------------------------------------------------------------------------------------------- growing media


def test_a_growing_medium_declines_the_tail_instead_of_evicting() -> None:
    index = SlotIndex(8)
    index.add_free(np.arange(4))
    store(index, K[:3])
    index.growing = True
    assert index.places_ready == 1
    plan = index.plan_store(K[2:6], NOW)
    assert (plan.positions, plan.already_held, plan.evicted) == ([1], [0], [])
    index.growing = False
    assert index.places_ready == math.inf
    assert len(index.plan_store(K[4:6], NOW).evicted) == 2


def test_a_growing_medium_uses_foreign_slots() -> None:
    index = SlotIndex(8)
    index.states.add_foreign(np.arange(4))
    index.growing = True
    assert index.places_ready == 4
    assert len(index.plan_store(K[:4], NOW).positions) == 4


def test_the_watermarks_of_a_growing_medium_are_shares_of_all_slots_that_it_will_have() -> None:
    index = SlotIndex(16, high_watermark=0.5, low_watermark=0.5)
    index.add_free(np.arange(8))
    index.growing = True
    store(index, K[:8])
    assert index.blocks == 8
    index.growing = False
    index.add_free(np.arange(8, 16))
    assert len(index.plan_store(K[8:10], NOW).evicted) == 2

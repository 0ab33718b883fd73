"""The index of a shared medium: its entries, their lifetimes, and its questions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tiering.index import shared
from tiering.index.shared import MAX_PROBES, REFUSED_SECONDS, SharedIndex, held_prefix
from tiering.index.tier_index import Probe
from tiering.medium.block_store import Place, StoreProbe
from tiering.secondary.contract import PrefixAnswer
from tiering.testing.keys import keys_of

K = keys_of(*range(32))
NOW = 100.0


def make_index() -> SharedIndex:
    index = SharedIndex(present_ttl=60, absent_ttl=5, lookup_deadline=0.25)
    index.enter("ns/epoch/")
    return index


def store(index: SharedIndex, keys: list[bytes], now: float = NOW) -> None:
    plan = index.plan_store(keys, now)
    index.end_store([keys[position] for position in plan.positions], plan.places, [True] * len(plan.places), now)


def ask(index: SharedIndex, keys: list[bytes], now: float = NOW) -> Probe:
    """Ask about an unknown prefix and return the resulting question to the medium."""
    assert index.lookup_prefix(keys, now).undecided
    (probe,) = index.take_probes(now)
    return probe


def test_places_are_sharded_names_under_the_prefix_made_of_the_key_alone() -> None:
    index = make_index()
    (place,) = index.plan_store(K[3:4], NOW).places
    digits = K[3].hex()
    assert place == f"ns/epoch/{digits[:2]}/{digits}"
    assert index.begin_load(K[3:4]) == [place]
    assert ask(index, K[4:6]).place_of(K[5]) == index.begin_load(K[4:6])[1]


def test_what_we_stored_is_present_until_its_time_has_passed() -> None:
    index = make_index()
    store(index, K[:3])
    assert index.lookup_prefix(K[:3], NOW + 59) == PrefixAnswer(3, False)
    assert index.lookup_prefix(K[:3], NOW + 60) == PrefixAnswer(0, True)


def test_a_store_that_failed_teaches_nothing() -> None:
    index = make_index()
    plan = index.plan_store(K[:2], NOW)
    index.end_store(K[:2], plan.places, [True, False], NOW)
    assert index.lookup_prefix(K[:2], NOW) == PrefixAnswer(1, True)


def test_blocks_present_or_being_written_are_not_written_again() -> None:
    index = make_index()
    store(index, K[:1])
    index.plan_store(K[1:2], NOW)
    plan = index.plan_store(K[:3], NOW)
    assert (plan.positions, plan.already_held) == ([2], [0])


def test_a_block_being_written_is_a_miss_and_not_asked_about() -> None:
    index = make_index()
    index.plan_store(K[:1], NOW)
    assert index.lookup_prefix(K[:1], NOW) == PrefixAnswer(0, False)
    assert list(index.take_probes(NOW)) == []


def test_a_prefix_is_asked_about_once_from_its_first_unknown_block_on() -> None:
    index = make_index()
    store(index, K[:2])
    probe = ask(index, K[:10])
    assert list(probe.keys) == K[2:10]
    for _ in range(3):
        assert index.lookup_prefix(K[:10], NOW) == PrefixAnswer(2, True)
    assert list(index.take_probes(NOW)) == []


def test_the_answer_is_no_after_the_lookup_deadline_until_the_probe_comes_back() -> None:
    index = make_index()
    probe = ask(index, K[:4])
    assert index.lookup_prefix(K[:4], NOW + 0.25) == PrefixAnswer(0, False)
    assert list(index.take_probes(NOW)) == []
    index.end_probe(probe, 3, NOW + 1)
    assert index.lookup_prefix(K[:4], NOW + 1) == PrefixAnswer(3, False)


def test_a_lookup_that_was_too_late_is_counted_once() -> None:
    index = make_index()
    probe = ask(index, K[:4])
    for _ in range(3):
        index.lookup_prefix(K[:4], NOW + 0.25)
    assert index.late_lookups == 1
    index.end_probe(probe, 3, NOW + 1)
    index.lookup_prefix(K[:3], NOW + 1)
    assert index.late_lookups == 1


def test_a_lookup_finds_at_its_deadline_the_head_that_the_probe_has_found() -> None:
    """A chain that is held in part takes three rounds of requests; the first finds its head."""
    index = make_index()
    rounds: list[int] = []
    probe = ask(index, K)

    def late(places: Sequence[Place]) -> StoreProbe:
        rounds.append(len(places))
        if len(rounds) == 2:
            assert index.lookup_prefix(K, NOW + 0.25) == PrefixAnswer(4, False)
            assert index.lookup_prefix(K, NOW + 0.26) == PrefixAnswer(4, False), "and does not wait again"
        return StoreProbe(tuple(place in held for place in places))

    held = set(map(probe.place_of, K[:13]))
    assert held_prefix(late, probe) == 13
    index.end_probe(probe, 13, NOW + 0.3)
    assert index.lookup_prefix(K, NOW + 0.31) == PrefixAnswer(13, False)
    assert index.late_lookups == 0


def test_a_late_lookup_takes_of_a_probe_no_more_than_both_chains_share() -> None:
    index = make_index()
    ask(index, K[:8]).held = 6
    other = [*K[:3], *keys_of(*range(100, 108))]
    assert index.lookup_prefix(other, NOW + 0.25) == PrefixAnswer(3, False)
    assert index.lookup_prefix(K[:3], NOW + 0.26) == PrefixAnswer(3, False)
    assert index.blocks == 3


def test_more_blocks_at_stake_are_worth_a_longer_wait_up_to_a_bound() -> None:
    index = SharedIndex(lookup_deadline=0.25, wait_per_block=0.01, longest_wait=0.5)
    for keys, wait in ((K[:1], 0.26), (K[1:11], 0.35), (keys_of(*range(100, 200)), 0.5)):
        assert ask(index, keys).expires == pytest.approx(NOW + wait)
        assert index.lookup_prefix(keys, NOW + wait - 0.001).undecided
        assert not index.lookup_prefix(keys, NOW + wait + 0.001).undecided


def test_a_probe_that_was_dropped_can_be_raised_again() -> None:
    index = make_index()
    index.end_probe(ask(index, K[:4]), None, NOW + 1)
    assert index.lookup_prefix(K[:4], NOW + 1.25).undecided


def test_refused_blocks_are_neither_found_nor_stored_for_an_hour() -> None:
    index = make_index()
    store(index, K[:4])
    index.refuse(K[1:2], NOW)
    assert index.lookup_prefix(K[:4], NOW) == PrefixAnswer(1, False)
    assert index.plan_store(K[1:2], NOW).positions == []
    assert list(index.lacking(K[:4], NOW) or ()) == []
    index.end_probe(ask(index, K[4:6]), 2, NOW)
    assert index.lookup_prefix(K[1:2], NOW) == PrefixAnswer(0, False)
    index.refuse(K[8:9], NOW + REFUSED_SECONDS)
    assert index.lookup_prefix(K[1:2], NOW + REFUSED_SECONDS).undecided


def test_a_refused_block_that_is_gone_can_be_stored_again() -> None:
    index = make_index()
    index.refuse(K[:1], NOW)
    index.pardon(K[0])
    assert index.plan_store(K[:1], NOW).positions == [0]


def test_refused_blocks_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_REFUSED", 3)
    index = make_index()
    index.refuse(K[:5], NOW)
    assert index.plan_store(K[:5], NOW).positions == [0, 1]


def test_what_a_probe_found_missing_is_a_miss_for_its_time_and_then_asked_about_again() -> None:
    index = make_index()
    index.end_probe(ask(index, K[:4]), 2, NOW)
    assert index.lookup_prefix(K[:4], NOW + 4) == PrefixAnswer(2, False)
    assert index.lookup_prefix(K[:4], NOW + 5) == PrefixAnswer(2, True)


def test_a_probe_that_learnt_nothing_is_not_repeated_at_once() -> None:
    index = make_index()
    index.end_probe(ask(index, K[:4]), None, NOW)
    assert index.lookup_prefix(K[:4], NOW + 0.2) == PrefixAnswer(0, False)
    assert index.lookup_prefix(K[:4], NOW + 0.25) == PrefixAnswer(0, True)


def test_a_store_during_a_probe_is_not_undone_by_its_answer() -> None:
    index = make_index()
    probe = ask(index, K[:2])
    store(index, K[:1], NOW + 0.1)
    index.end_probe(probe, 0, NOW + 0.2)
    assert index.lookup_prefix(K[:1], NOW + 0.2) == PrefixAnswer(1, False)


def test_places_behind_a_block_that_a_probe_missed_are_announced_as_absent_before_their_store() -> None:
    absent: list[Place] = []
    index = SharedIndex(present_ttl=60, absent_ttl=5, on_absent=absent.extend)
    index.enter("ns/epoch/")
    assert index.plan_store(K[:2], NOW).places  # no probe has asked for them
    assert absent == []
    index.end_probe(ask(index, K[4:8]), 1, NOW)
    assert index.plan_store(K[4:5], NOW).already_held == [0]
    assert index.plan_store(K[6:8], NOW + 4).places  # the probe found a block before these absent, not these
    assert absent == []
    assert index.plan_store(K[4:6], NOW + 4).places == absent
    index.end_probe(ask(index, K[8:12]), 0, NOW)
    index.plan_store(K[8:12], NOW + 5)  # too long ago
    assert len(absent) == 1


def test_probes_are_cautious_after_misses_in_a_row_until_one_finds_a_block() -> None:
    index = SharedIndex(cautious_after=2)
    index.enter("ns/epoch/")
    for number, (held, cautious) in enumerate([(0, False), (0, False), (0, True), (1, True), (0, False)]):
        probe = ask(index, K[2 * number : 2 * number + 2])
        assert probe.cautious is cautious
        index.end_probe(probe, held, NOW)
    never = make_index()
    for number in range(8):
        probe = ask(never, K[number : number + 1])
        assert not probe.cautious
        never.end_probe(probe, 0, NOW)


def test_a_load_that_finds_a_block_missing_makes_it_absent() -> None:
    index = make_index()
    store(index, K[:3])
    places = index.begin_load(K[:3])
    assert index.end_load(K[:3], [place for place in places if place], [False, True, False], NOW) == [K[1]]
    assert index.lookup_prefix(K[:3], NOW) == PrefixAnswer(1, False)
    assert index.lookup_prefix(K[:3], NOW + 5) == PrefixAnswer(1, True)


def test_storing_an_absent_block_makes_it_present() -> None:
    index = make_index()
    index.end_probe(ask(index, K[:1]), 0, NOW)
    store(index, K[:1])
    assert index.lookup_prefix(K[:1], NOW) == PrefixAnswer(1, False)


def test_memory_is_bounded_and_the_oldest_knowledge_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_ENTRIES", 8)
    index = make_index()
    for number in range(12):
        store(index, K[number : number + 1])
    assert index.blocks == 8
    assert index.lookup_prefix(K[3:4], NOW).held == 0
    assert index.lookup_prefix(K[4:12], NOW).held == 8


def test_open_questions_are_bounded() -> None:
    index = make_index()
    keys = keys_of(*range(MAX_PROBES + 1))
    for key in keys[:-1]:
        assert index.lookup_prefix([key, *K], NOW).undecided
    assert index.lookup_prefix([*keys[-1:], *K], NOW) == PrefixAnswer(0, False)
    assert len(index.take_probes(NOW)) == MAX_PROBES


def test_questions_about_single_blocks_leave_half_of_the_open_ones_to_chains() -> None:
    """One search may ask about 64 blocks at once, and 16 such requests come in a burst."""
    index = make_index()
    answers = [index.lookup_prefix([key], NOW).undecided for key in keys_of(*range(MAX_PROBES))]
    assert sum(answers) == MAX_PROBES // 2
    assert index.lookup_prefix(K, NOW).undecided


def test_nothing_of_before_is_known_after_clear_and_late_answers_are_ignored() -> None:
    index = make_index()
    store(index, K[:2])
    late_probe = ask(index, K[4:6])
    late_store = index.plan_store(K[6:8], NOW)
    late_load = [place for place in index.begin_load(K[:2]) if place]
    assert list(map(list, index.clear())) == [K[:2]]
    index.enter("ns/epoch-2/")
    index.end_probe(late_probe, 2, NOW)
    index.end_store(K[6:8], late_store.places, [True, True], NOW)
    assert index.end_load(K[:2], late_load, [True, True], NOW) == []
    for start in (0, 4, 6):
        assert index.lookup_prefix(K[start : start + 2], NOW) == PrefixAnswer(0, True)


def test_a_late_write_of_an_earlier_epoch_does_not_end_one_of_this_epoch() -> None:
    index = make_index()
    late = index.plan_store(K[:1], NOW)
    index.clear()
    index.enter("ns/epoch-2/")
    index.plan_store(K[:1], NOW)
    index.end_store(K[:1], late.places, [False], NOW)
    assert index.plan_store(K[:1], NOW).positions == []


class TestBlocksBehindAnAbsentOne:
    """A prompt whose blocks have left the medium is stored again as a whole, at once."""

    def lost(self, index: SharedIndex, now: float) -> None:
        """Let a load of the first eight blocks find nothing."""
        index.end_load(K[:8], [place for place in index.begin_load(K[:8]) if place], [True] * 8, now)

    def test_a_store_of_the_chain_writes_all_of_them(self) -> None:
        index = make_index()
        store(index, K)
        self.lost(index, NOW + 10)
        assert index.plan_store(K, NOW + 11).positions == list(range(32))

    def test_a_lookup_of_the_chain_drops_what_was_known_so_that_stores_in_parts_write_them(self) -> None:
        index = make_index()
        store(index, K)
        self.lost(index, NOW + 10)
        assert index.lookup_prefix(K, NOW + 11) == PrefixAnswer(0, False)
        assert index.plan_store(K[8:20], NOW + 11).positions == list(range(12))

    def test_a_use_of_the_chain_offers_all_of_them_also_after_a_probe(self) -> None:
        index = make_index()
        store(index, K)
        probe = ask(index, K, NOW + 61)
        index.end_probe(probe, 0, NOW + 62)
        assert index.lacking(K, NOW + 63) == K

    def test_blocks_in_front_of_it_and_blocks_stored_since_stay(self) -> None:
        index = make_index()
        store(index, K)
        index.end_load(K[4:8], [place for place in index.begin_load(K[4:8]) if place], [True] * 4, NOW + 10)
        index._learn_present(K[20:24], NOW + 71)  # Another machine has stored them.
        plan = index.plan_store(K, NOW + 12)
        assert plan.positions == [position for position in range(4, 32) if position not in range(20, 24)]

    def test_a_probe_without_an_answer_drops_nothing(self) -> None:
        index = make_index()
        store(index, K)
        index.end_probe(ask(index, K, NOW + 61), None, NOW + 62)
        assert index.lookup_prefix(K, NOW + 62) == PrefixAnswer(0, False)
        assert index.lacking(K, NOW + 62) == K[:1]

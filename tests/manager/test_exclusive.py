"""A CPU tier that prefers blocks which the engine's own cache does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import LATE_STORE, WANTED_STORE
from tiering.manager.late_copies import LateCopies
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

A, B, C, D, E, F, G, H = KEYS = keys_of(*range(8))


class Rig(ManagerRig):
    """An exclusive manager beside an engine's cache, which is a set of keys."""

    def __init__(self, rows: int, *tiers: FakeTier) -> None:
        super().__init__(rows, tiers, exclusive=True)
        self.engine: set[OffloadKey] = set()
        assert self.manager.hold_exclusively(lambda keys: [key in self.engine for key in keys])

    def late(self, *keys: OffloadKey) -> Sequence[OffloadKey] | None:
        """Store blocks that leave the engine's cache, the last one first; return those that were copied."""
        output = self.manager.prepare_late_store(keys)
        if output is None:
            return None
        self.manager.complete_store(output.keys_to_store, LATE_STORE)
        return output.keys_to_store

    def held(self) -> set[OffloadKey]:
        return {key for key in KEYS if key in self.primary.readable}


def test_an_inclusive_manager_stays_what_it_is() -> None:
    rig = ManagerRig(4)
    assert not rig.manager.hold_exclusively(lambda keys: [True] * len(keys))
    rig.store([A, B, C, D])
    rig.manager.engine_holds([D])
    rig.store([E])
    assert {key for key in KEYS if key in rig.primary.readable} == {A, B, C, E}
    assert rig.manager.stores_computed


def test_an_inclusive_manager_says_nothing_about_an_engine_that_does_not_show_its_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not ManagerRig(4).manager.hold_exclusively(None)
    assert not caplog.records


def test_nothing_is_stored_as_it_is_computed_unless_other_tiers_are_fed() -> None:
    assert not Rig(4).manager.stores_computed
    assert Rig(4, FakeTier("disk")).manager.stores_computed


def test_a_loaded_row_goes_first_and_comes_back_when_its_block_leaves_the_engine() -> None:
    rig = Rig(3)
    assert rig.late(A, B, C) == [A, B, C]
    rig.engine.add(A)
    rig.manager.engine_holds([A])
    assert rig.late(D) == [D]
    assert rig.held() == {B, C, D}
    rig.engine.add(D)
    rig.manager.engine_holds([D])
    assert rig.late(D) == []  # its row is there, and the most recent one from now on
    assert rig.late(E) == [E]
    assert rig.held() == {B, D, E}


def test_a_row_that_the_engine_holds_twice_over_is_taken_once() -> None:
    rig = Rig(3)
    rig.late(A, B, C)
    rig.engine.add(A)
    rig.manager.engine_holds([A, H, A])  # H has no row
    assert rig.late(D, E) == [D, E]
    assert len(set(rig.primary.readable.values())) == len(rig.held()) == 3
    assert {D, E} < rig.held()


def test_stored_rows_go_first_once_their_cascade_has_ended() -> None:
    tier = FakeTier("disk")
    rig = Rig(3, tier)
    rig.engine.update(KEYS)
    rig.late(A)
    output = rig.manager.prepare_store([B, C], rig.ctx)
    assert output is not None
    rig.manager.complete_store(output.keys_to_store, rig.ctx)
    assert rig.late(D) == [D]
    assert rig.held() == {B, C, D}, "rows that a cascade reads are no victims"
    for job in list(tier.stores):
        tier.finish(job)
    rig.step()
    assert rig.late(E) == [E]
    assert rig.held() == {B, D, E}


def test_a_late_store_is_offered_to_no_tier_and_is_no_use() -> None:
    tier = FakeTier("disk")
    rig = Rig(4, tier)
    rig.late(A, B)
    rig.late(A)
    assert not tier.stores
    assert not any(map(tier.calls, ("admit", "touch", "used")))
    rig.store([C])
    assert tier.calls("admit") or tier.calls("submit_store"), "the calls would be seen"


def test_a_late_store_takes_no_row_that_is_read_and_then_changes_nothing() -> None:
    rig = Rig(2)
    rig.late(A, B)
    rig.manager.prepare_load([A, B], rig.ctx)
    assert rig.late(C) is None
    assert rig.held() == {A, B}
    rig.manager.complete_load([A, B], rig.ctx)
    assert rig.late(C) == [C]


def test_the_head_of_what_leaves_together_stays_more_recent_than_what_is_copied() -> None:
    rig = Rig(3)
    rig.late(A)
    assert rig.late(A, B, C) == [B, C]
    rig.late(D)
    assert rig.held() == {A, B, D}


@pytest.mark.parametrize("end", ["success", "failure", "reset"])
def test_what_leaves_together_is_forgotten_at_the_end_of_its_store(end: str) -> None:
    rig = Rig(3)
    rig.late(A)
    output = rig.manager.prepare_late_store([A, B])
    assert output is not None
    assert rig.manager._jobs.late_copies.leaving == {B: [A, B]}
    if end == "reset":
        rig.manager.reset_cache()
    else:
        rig.manager.complete_store([B], LATE_STORE, success=end == "success")
    assert rig.manager._jobs.late_copies.leaving == {}


def test_a_late_store_across_a_reset_frees_its_rows() -> None:
    rig = Rig(2)
    output = rig.manager.prepare_late_store([A, B])
    assert output is not None
    rig.manager.reset_cache()
    again = rig.manager.prepare_late_store([A])
    assert again is not None
    assert again.keys_to_store == [], "its row is still written"
    rig.manager.complete_store(output.keys_to_store, LATE_STORE)
    assert rig.held() == set()
    assert rig.late(A, B) == [A, B]


def test_a_failed_late_store_leaves_nothing() -> None:
    rig = Rig(2)
    output = rig.manager.prepare_late_store([A])
    assert output is not None
    rig.manager.complete_store([A], LATE_STORE, success=False)
    assert rig.held() == set()
    assert rig.primary.room == 2


def test_a_tier_gets_a_block_that_it_wants_and_only_the_engine_holds() -> None:
    other, tier = FakeTier("fast"), FakeTier("disk")
    rig = Rig(4, other, tier)
    rig.manager.on_schedule_end()
    tier.wanted = [A, B]
    rig.late(B)
    rig.step()
    assert [job.keys for job in tier.stores] == [(B,)], "what has a row is offered at once"
    assert list(rig.manager.take_wanted()) == [A]
    assert not rig.manager.take_wanted()
    output = rig.manager.prepare_late_store([A])
    assert output is not None
    rig.manager.complete_store(output.keys_to_store, WANTED_STORE)
    assert [job.keys for job in tier.stores] == [(B,), (A,)]
    assert not other.stores


def test_a_tier_gets_a_block_that_it_wants_and_that_has_got_a_row_meanwhile() -> None:
    tier = FakeTier("disk")
    rig = Rig(4, tier)
    rig.manager.on_schedule_end()
    tier.wanted = [A, B]
    rig.step()
    rig.late(A)
    assert list(rig.manager.take_wanted()) == [B]
    assert [job.keys for job in tier.stores] == [(A,)]


def test_an_inclusive_tier_looks_for_nothing_in_the_engines_cache() -> None:
    tier = FakeTier("disk")
    rig = ManagerRig(4, [tier])
    tier.wanted = [A]
    rig.step()
    assert not rig.manager.take_wanted()


def test_a_block_that_a_tier_has_taken_is_copied_no_second_time_before_it_is_used_again() -> None:
    rig = Rig(3, FakeTier("disk"))
    rig.engine.update(KEYS)
    rig.store([A, B])
    assert rig.late(C, D, E) == [C, D, E], "the rows of the others have gone"
    assert not rig.held() & {A, B}
    assert rig.late(A) == []
    assert rig.manager.engine_dropped([B]) == 0, "the tier has it, so that it is not lost"
    rig.engine.difference_update([A, B])
    assert rig.late(A, B) == [A, B], "each time that they leave the engine again"


def test_a_row_of_a_block_that_leaves_goes_to_none_that_leaves_with_it() -> None:
    rig = Rig(3, tier := FakeTier("disk"))
    rig.engine.update(KEYS)
    rig.store([A])
    for job in list(tier.stores):
        tier.finish(job)
    rig.step()
    assert rig.late(A, B, C, D) is None, "the tier has A, whose row may nevertheless not become another's"
    assert rig.held() == {A}
    assert rig.late(A, B, C) == [B, C]
    assert rig.held() == {A, B, C}


def test_a_fed_block_that_was_loaded_since_is_stored_late() -> None:
    rig = Rig(3, FakeTier("disk"))
    rig.engine.update(KEYS)
    rig.store([A])
    rig.manager.prepare_load([A], rig.ctx)
    rig.manager.complete_load([A], rig.ctx)
    rig.manager.engine_holds([A])
    assert rig.late(B, C, D) == [B, C, D]
    assert rig.late(A) == [A]


@pytest.mark.parametrize(
    "end",
    [
        "fails",
        "came late",
        "reset",
        "tier fails",
        "may be computed",
        "is never loaded",
        "goes before a row would",
        "may go before a row would",
    ],
)
def test_a_block_that_requests_may_not_find_in_a_tier_is_stored_late(end: str) -> None:
    rules: dict[str, Any] = {
        "may be computed": {"load_or_compute": "auto"},
        "is never loaded": {"load_or_compute": "never"},
        "goes before a row would": {"capacity_blocks": 2},
        "may go before a row would": {"capacity_blocks": None},
    }
    tier = FakeTier("disk", **rules.get(end, {}))
    rig = Rig(3, tier)
    rig.engine.update(KEYS)
    output = rig.manager.prepare_store([A], rig.ctx)
    assert output is not None
    rig.manager.complete_store([A], rig.ctx)
    if end == "came late":
        rig.manager.engine_dropped([A])
    for job in list(tier.stores):
        tier.finish(job, success=end != "fails")
    rig.step()
    if end == "reset":
        rig.manager.reset_cache()
    if end == "tier fails":
        tier.raises = {"get_finished"}
        rig.step()
    assert rig.late(B, C, D) == [B, C, D]
    assert rig.late(A) == [A]


def test_what_a_faster_tier_takes_from_a_slower_one_is_stored_late() -> None:
    fast, slow = FakeTier("fast", admits=set()), FakeTier("slow")
    slow.held = {A}
    rig = Rig(3, fast, slow)
    rig.engine.update(KEYS)
    assert rig.manager.match_prefix([A], rig.ctx).pending
    rig.step()
    fast.admits = None
    for job in list(slow.loads):
        slow.finish(job)
    rig.step()
    assert rig.manager.match_prefix([A], rig.ctx) == (1, False)
    rig.manager.prepare_load([A], rig.ctx)
    rig.manager.complete_load([A], rig.ctx)
    rig.manager.engine_holds([A])
    assert [job.is_fill for job in fast.stores] == [True]
    for job in list(fast.stores):
        fast.finish(job)
    rig.step()
    assert rig.late(B, C, D) == [B, C, D]
    assert rig.late(A) == [A]


def test_a_promoted_block_is_reserved_until_loaded_and_then_goes_first() -> None:
    """Not before the last request that has reserved it, nor before a faster tier has read it."""
    fast, slow = FakeTier("fast"), FakeTier("slow")
    slow.held = {A}
    rig = Rig(3, fast, slow)
    first, second = rig.request("first"), rig.request("second")
    assert all(rig.manager.match_prefix([A], ctx).pending for ctx in (first, second))
    rig.step()
    for job in list(slow.loads):
        slow.finish(job)
    rig.step()

    def stays() -> bool:
        rig.engine.update(KEYS)
        before = rig.held()
        new = next(key for key in KEYS[1:] if key not in before)
        assert rig.late(new) == [new]
        return A in rig.held()

    assert all(stays() for _ in range(4)), "two requests have reserved it"
    for ctx in (first, second):
        assert stays(), "a request has reserved it"
        assert rig.manager.match_prefix([A], ctx) == (1, False)
        rig.manager.prepare_load([A], ctx)
        assert stays(), "a request loads it"
        rig.manager.complete_load([A], ctx)
        rig.manager.engine_holds([A])
        rig.manager.on_request_finished(ctx)
    assert [job.is_fill for job in fast.stores] == [True]
    assert stays(), "the faster tier still reads it"
    for job in list(fast.stores):
        fast.finish(job)
    rig.step()
    assert not stays()


def test_a_tier_gets_a_block_that_another_tier_has_taken_from_the_engine() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow", admits=set())
    rig = Rig(3, fast, slow)
    rig.engine.update(KEYS)
    rig.store([A])
    assert rig.late(B, C, D) == [B, C, D]
    slow.wanted = [A]
    rig.step()
    assert list(rig.manager.take_wanted()) == [A]
    output = rig.manager.prepare_late_store([A])
    assert output is not None
    assert output.keys_to_store == [A]


def test_fed_blocks_are_forgotten_when_they_are_more_than_the_engine_can_hold() -> None:
    fed = LateCopies(())
    fed.most = 3
    fed.fed([A, B])
    assert (list(fed.chosen([A, C, B, D])), len(fed)) == ([C, D], 2)
    fed.fed([C, D])
    assert (list(fed.chosen(KEYS)), len(fed)) == (KEYS, 0)

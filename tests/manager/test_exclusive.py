"""A CPU tier that prefers blocks which the engine's own cache does not hold."""

from __future__ import annotations

from collections.abc import Sequence

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import LATE_STORE, WANTED_STORE
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


def test_a_late_store_across_a_reset_frees_its_rows() -> None:
    rig = Rig(2)
    output = rig.manager.prepare_late_store([A, B])
    assert output is not None
    rig.manager.reset_cache()
    assert rig.manager.prepare_late_store([A]) is None, "the rows are still written"
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


def test_an_inclusive_tier_looks_for_nothing_in_the_engines_cache() -> None:
    tier = FakeTier("disk")
    rig = ManagerRig(4, [tier])
    tier.wanted = [A]
    rig.step()
    assert not rig.manager.take_wanted()

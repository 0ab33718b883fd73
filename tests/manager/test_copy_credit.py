"""The bound of the copies out of the engine's cache into an exclusive CPU tier."""

from __future__ import annotations

import pytest

from tests.manager.test_exclusive import Rig
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

KEYS = keys_of(*range(40))
OLD, NEW, LOADED = KEYS[:16], KEYS[16:], KEYS[:2]


def rig_of(rows: int, blocks: int, *tiers: FakeTier) -> Rig:
    """Return a manager beside an engine's cache of ``blocks`` blocks; 0: of an unknown size."""
    rig = Rig(rows, *tiers)
    assert rig.manager.hold_exclusively(lambda keys: [key in rig.engine for key in keys], blocks)
    return rig


def load(rig: Rig, keys: list[OffloadKey], name: str = "load") -> None:
    ctx = ReqContext(name)
    rig.manager.on_new_request(ctx)
    rig.manager.prepare_load(keys, ctx)
    rig.manager.complete_load(keys, ctx)
    rig.engine.update(keys)
    rig.manager.engine_holds(keys)


@pytest.mark.parametrize(("blocks", "bounded"), [(0, False), (4, True)])
def test_held_rows_stay_while_their_next_copies_would_be_too_many(blocks: int, bounded: bool) -> None:
    """There may be a sixth of a copy of a loaded block for each of a computed one."""
    rig = rig_of(16, blocks)
    assert rig.late(*OLD) == OLD
    for number in range(6):
        load(rig, LOADED, f"load {number}")
        rig.primary.drop(LOADED)
        assert rig.late(*LOADED) == LOADED, "no tier has them: they are copied whatever it costs"
    load(rig, LOADED)
    rig.late(NEW[0])
    assert (LOADED[1] in rig.primary.readable) is bounded
    assert (OLD[-1] in rig.primary.readable) is not bounded
    if bounded:
        assert rig.primary.copy_credit == pytest.approx(2 - 6 * len(LOADED) + 1 / 6)
    rig.primary.grant_copies(100.0)
    rig.late(NEW[1])
    assert LOADED[1] not in rig.primary.readable


def brought(rig: Rig, tier: FakeTier, keys: list[OffloadKey], name: str) -> None:
    """Load blocks into the engine that the tier alone holds; their rows go thereafter."""
    ctx = ReqContext(name)
    rig.manager.on_new_request(ctx)
    assert rig.manager.match_prefix(keys, ctx).pending
    rig.step()
    for job in list(tier.loads):
        tier.finish(job)
    rig.step()
    assert rig.manager.match_prefix(keys, ctx) == (len(keys), False)
    rig.manager.prepare_load(keys, ctx)
    rig.manager.complete_load(keys, ctx)
    rig.primary.drop(keys)


@pytest.mark.parametrize("end", ["tier fails", "its blocks may go before a row would", "tier stays"])
def test_what_a_tier_has_brought_is_copied_whatever_it_costs_if_the_tier_may_not_have_it_again(end: str) -> None:
    tier = FakeTier("disk", capacity_blocks=None if end == "its blocks may go before a row would" else 1 << 40)
    tier.held = set(KEYS)
    rig = rig_of(16, 16, tier)
    rig.engine.update(KEYS)
    assert rig.manager.match_prefix(KEYS[:2], rig.ctx).pending
    rig.step()
    for job in list(tier.loads):
        tier.finish(job)
    rig.step()
    assert rig.manager.match_prefix(KEYS[:2], rig.ctx) == (2, False)
    rig.manager.prepare_load(KEYS[:2], rig.ctx)
    if end == "tier fails":
        tier.raises = {"get_finished"}
        rig.step()
    rig.manager.complete_load(KEYS[:2], rig.ctx)
    rig.primary.drop(KEYS[:2])
    assert rig.late(*KEYS[:2]) == ([] if end == "tier stays" else KEYS[:2])


def test_what_a_tier_has_brought_is_copied_late_from_half_of_the_credit_on() -> None:
    tier = FakeTier("disk")
    tier.held = set(KEYS)
    rig = rig_of(16, 16, tier)
    rig.engine.update(KEYS)
    brought(rig, tier, KEYS[:2], "a")
    assert rig.late(*KEYS[:2]) == [], "there is no credit yet"
    rig.store(KEYS[20:24])  # four copies as an inclusive tier makes them: as many more may be made
    brought(rig, tier, KEYS[2:4], "b")
    assert rig.late(*KEYS[2:4]) == KEYS[2:4], "a quarter of the engine's blocks"
    brought(rig, tier, KEYS[4:6], "c")
    assert rig.late(*KEYS[4:6]) == []
    load(rig, KEYS[2:4], "d")
    rig.primary.drop(KEYS[2:4])
    assert rig.late(*KEYS[2:4]) == KEYS[2:4], "the CPU tier has served them"


@pytest.mark.parametrize(("blocks", "goes"), [(8, True), (6, False)])
def test_a_much_larger_tier_keeps_the_rows_that_a_tier_has_taken(blocks: int, goes: bool) -> None:
    rig = rig_of(16, blocks, FakeTier("disk"))
    rig.engine.update(KEYS)
    rig.store(KEYS[:16])
    rig.manager.touch([KEYS[15]], rig.ctx)
    rig.primary.grant_copies(-100.0)
    rig.late(KEYS[20])
    assert (KEYS[15] not in rig.primary.readable) is goes, "a first victim, or else the most recent row"


@pytest.mark.parametrize(
    ("disk", "rows", "bounded"), [(15, 16, False), (16, 16, True), (15, 17, True), (None, 16, True)]
)
def test_a_small_disk_behind_a_tier_of_the_engines_size_bounds_no_copies(
    disk: int | None, rows: int, bounded: bool
) -> None:
    """A block that it has dropped would be computed again, and copied as often."""
    rig = rig_of(rows, 16, FakeTier("disk", capacity_blocks=disk))
    assert rig.late(*KEYS[:4]) == KEYS[:4]
    assert (rig.primary.copy_credit < 0.0) is bounded
